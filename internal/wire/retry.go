package wire

import (
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

// RetryLater adds to the error of a status when the client should come back, as RetryInfo and in the message.
func RetryLater(err error, after time.Duration) error {
	s := status.Convert(err)
	s = status.New(s.Code(), s.Message()+": try again in "+after.Round(time.Second).String())
	with, err := s.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(after)})
	if err != nil {
		return s.Err() // the delay is in the message too
	}
	return with.Err()
}
