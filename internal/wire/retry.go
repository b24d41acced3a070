package wire

import (
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

// RetryLater returns the status err with a delay after which the client should come back. The delay
// is in a RetryInfo and in the message.
func RetryLater(err error, after time.Duration) error {
	s := status.Convert(err)
	s = status.New(s.Code(), s.Message()+": try again in "+after.Round(time.Second).String())
	with, err := s.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(after)})
	if err != nil {
		return s.Err() // the message has the delay too
	}
	return with.Err()
}

// RetryAfter returns the delay of an error that RetryLater has made, possibly on another machine.
// It returns 0 for all others. A server can ask for any time, so the caller bounds it.
func RetryAfter(err error) time.Duration {
	if s, ok := status.FromError(err); ok {
		for _, d := range s.Details() {
			if info, ok := d.(*errdetails.RetryInfo); ok {
				return max(info.GetRetryDelay().AsDuration(), 0)
			}
		}
	}
	return 0
}
