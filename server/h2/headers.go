package h2

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

const (
	httpOK = http.StatusOK
	// maxMessage bounds a status' message, in bytes, if the whole trailers are larger than the
	// client accepts.
	maxMessage = 512
)

// contentType is gRPC's content-type. The name of a message format may follow it.
const contentType = "application/grpc"

// responseHeaders is the header block of every response with messages.
var responseHeaders = encodeHeaders([]hpack.HeaderField{
	{Name: ":status", Value: strconv.Itoa(httpOK)}, {Name: "content-type", Value: contentType},
})

// encodeHeaders returns a header block that does not use the dynamic table (RFC 7541), so that it
// does not depend on earlier blocks.
func encodeHeaders(fields []hpack.HeaderField) []byte {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	e.SetMaxDynamicTableSize(0)
	for _, f := range fields {
		_ = e.WriteField(f) // a buffer accepts everything
	}
	return b.Bytes()
}

// request is what gRPC uses of a stream's headers.
type request struct {
	metadata   metadata.MD
	timeout    time.Duration
	hasTimeout bool
}

type refusal struct {
	httpStatus int
	status     *status.Status
}

func refuse(httpStatus int, code codes.Code, format string, args ...any) *refusal {
	return &refusal{httpStatus, status.Newf(code, format, args...)}
}

// checkRequest reports whether a request is well-formed according to RFC 9113, section 8.1.1, as
// far as the framer has not checked that. length is its content-length, or negative if it has none.
func checkRequest(f *http2.MetaHeadersFrame) (length int64, ok bool) {
	length = -1
	for _, h := range f.RegularFields() {
		switch h.Name {
		case "connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade":
			return 0, false
		case "te":
			if h.Value != "trailers" {
				return 0, false
			}
		case "content-length":
			n, err := strconv.ParseUint(h.Value, 10, 63)
			if err != nil || length >= 0 && length != int64(n) {
				return 0, false
			}
			length = int64(n)
		}
	}
	for _, name := range []string{"method", "scheme", "path"} {
		if f.PseudoValue(name) == "" && !f.Truncated {
			return 0, false
		}
	}
	return length, !f.StreamEnded() || length <= 0
}

// parseRequest parses a stream's headers according to gRPC's protocol over HTTP/2. Where the
// protocol leaves a case open, it does as grpc-go does.
func parseRequest(f *http2.MetaHeadersFrame, path string) (r request, _ *refusal) {
	if f.Truncated {
		return r, refuse(http.StatusRequestHeaderFieldsTooLarge, codes.ResourceExhausted, "the request's headers are "+
			"too large")
	}
	r.metadata = metadata.MD{}
	var kind string
	for _, h := range f.RegularFields() {
		switch h.Name {
		case "content-type":
			kind = h.Value
			r.metadata.Append(h.Name, h.Value)
		case "grpc-timeout":
			var err error
			if r.timeout, err = parseTimeout(h.Value); err != nil {
				return r, refuse(http.StatusBadRequest, codes.Internal, "%v", err)
			}
			r.hasTimeout = true
		// reserved by gRPC
		case "te", "grpc-encoding", "grpc-message", "grpc-message-type", "grpc-status":
		default:
			v := h.Value
			if strings.HasSuffix(h.Name, "-bin") {
				b, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(v, "="))
				if err != nil {
					return r, refuse(http.StatusBadRequest, codes.Internal, "header %q is not base64: %v", h.Name, err)
				}
				v = string(b)
			}
			r.metadata.Append(h.Name, v)
		}
	}
	host := r.metadata["host"]
	delete(r.metadata, "host")
	if authority := f.PseudoValue("authority"); authority != "" {
		r.metadata.Set(":authority", authority)
	} else if len(host) > 0 {
		r.metadata[":authority"] = host
	}
	switch method := f.PseudoValue("method"); {
	case kind != contentType && !strings.HasPrefix(kind, contentType+"+") && !strings.HasPrefix(kind, contentType+";"):
		return r, refuse(http.StatusUnsupportedMediaType, codes.InvalidArgument, "the content-type is %q: use %s",
			kind, contentType)
	case len(host) > 1 || len(r.metadata[":authority"]) == 0:
		return r, refuse(http.StatusBadRequest, codes.Internal, "the request must have one :authority or host")
	case method != http.MethodPost:
		return r, refuse(http.StatusMethodNotAllowed, codes.Internal, "the :method is %q: use POST", method)
	case f.PseudoValue("path") != path:
		return r, refuse(httpOK, codes.Unimplemented,
			"this connection serves only %s: for %s, open a connection that offers only the protocol %s in TLS",
			path, f.PseudoValue("path"), http2Protocol)
	}
	return r, nil
}

var timeoutUnits = map[byte]time.Duration{
	'H': time.Hour, 'M': time.Minute, 'S': time.Second, 'm': time.Millisecond, 'u': time.Microsecond, 'n': time.Nanosecond,
}

// parseTimeout parses the header grpc-timeout: at most eight digits and a unit.
func parseTimeout(v string) (time.Duration, error) {
	if n := len(v) - 1; n >= 1 && n <= 8 {
		count, err := strconv.ParseUint(v[:n], 10, 32)
		if unit, ok := timeoutUnits[v[n]]; ok && err == nil {
			if time.Duration(count) > math.MaxInt64/unit {
				return math.MaxInt64, nil
			}
			return time.Duration(count) * unit, nil
		}
	}
	return 0, fmt.Errorf("header grpc-timeout is %q: use up to eight digits and one of H, M, S, m, u, n", v)
}

func statusOf(err error) *status.Status {
	if s, ok := status.FromError(err); ok {
		return s
	}
	return status.FromContextError(err)
}

// trailers returns the header block that ends a stream. It fits into a frame, and its size is at
// most limit if truncating the message suffices. httpStatus is sent if the response has no headers
// yet, and is 0 otherwise.
func trailers(httpStatus int, st *status.Status, limit uint32) []byte {
	fields := trailerFields(httpStatus, st)
	size := uint32(0)
	for _, f := range fields {
		size += f.Size()
	}
	block := encodeHeaders(fields)
	if size > limit || len(block) > frameSize {
		message := st.Message()
		return encodeHeaders(trailerFields(httpStatus, status.New(st.Code(), message[:min(len(message), maxMessage)])))
	}
	return block
}

func trailerFields(httpStatus int, st *status.Status) (fields []hpack.HeaderField) {
	add := func(name, value string) { fields = append(fields, hpack.HeaderField{Name: name, Value: value}) }
	if httpStatus != 0 {
		add(":status", strconv.Itoa(httpStatus))
		add("content-type", contentType)
	}
	add("grpc-status", strconv.Itoa(int(st.Code())))
	message := strings.ToValidUTF8(st.Message(), "\uFFFD")
	add("grpc-message", encodeMessage(message))
	if p := st.Proto(); len(p.GetDetails()) > 0 {
		p.Message = message
		if b, err := proto.Marshal(p); err == nil { // it has no other strings
			add("grpc-status-details-bin", base64.RawStdEncoding.EncodeToString(b))
		}
	}
	return fields
}

// encodeMessage percent-encodes a status' message for a header.
func encodeMessage(m string) string {
	var b strings.Builder
	for _, c := range []byte(m) {
		if c >= ' ' && c <= '~' && c != '%' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}
