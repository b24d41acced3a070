// This file is version skew: agents, relays and servers of one form of the wire API before this
// one, and of one after it. Between a client and a server, fields and capabilities that one of the
// two does not know are left out, or others are added. An older agent also keeps less of the
// objects than it is sent. An older relay keeps all of it: what it would drop, its agents could not
// have.
package simulate

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// form is a form of the wire API.
type form uint8

const (
	present form = iota // that of this tree
	older               // without staleness, probes, capabilities and, in agents, IPVS schedulers
	newer               // with a field and a capability that this tree does not know
	forms
)

func (f form) String() string {
	return [...]string{"the present form", "an older form", "a newer form"}[f]
}

// schedulers are the IPVS schedulers that Services may ask for.
var schedulers = []string{"", "sh", "wrr"}

// drawForms sets the forms of all parts, at random in half of the clusters.
func (w *world) drawForms(n uint32) {
	if n&1 == 0 {
		return
	}
	for i, s := range w.servers {
		w.setForm(s.host(), form(n>>(1+2*i)%uint32(forms)))
	}
	for i, o := range w.nodes {
		o.form = form(n >> (11 + 2*i) % uint32(forms))
	}
}

// setForm sets the form of the server or relay of a host.
func (w *world) setForm(host string, f form) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.forms[host] = f
}

// formOf returns the form of the server or relay of a host.
func (w *world) formOf(host string) form {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.forms[host]
}

// hostOf returns the host of a channel's target.
func hostOf(target string) string {
	host, _, _ := strings.Cut(target[strings.LastIndexByte(target, '/')+1:], ":")
	return host
}

// changeForm upgrades or downgrades an agent, a relay or a server. An agent keeps its checkpoint.
func (w *world) changeForm(s step) string {
	f := form(s.b % uint32(forms))
	if s.c&1 == 0 {
		n := pick(w.nodes, s.a)
		if n.agent == nil {
			return ""
		}
		n.stop()
		n.form = f
		n.start()
		return fmt.Sprintf("%s: the agent is replaced by one of %v", n.name, f)
	}
	o := pick(w.servers, s.a)
	if o.life == nil {
		return ""
	}
	o.stop()
	w.setForm(o.host(), f)
	o.start()
	return fmt.Sprintf("%s drains and is replaced by one of %v", o.name, f)
}

// skewed returns what makes a client of a form speak with servers of theirs, and hear their lies.
func (w *world) skewed(name string, client func() form) grpc.DialOption {
	return grpc.WithStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string,
		streamer grpc.Streamer, opts ...grpc.CallOption,
	) (grpc.ClientStream, error) {
		stream, err := streamer(ctx, desc, conn, method, opts...)
		if err != nil {
			return nil, err
		}
		host := hostOf(conn.Target())
		return &skewedStream{ClientStream: stream, world: w, name: name, host: host, client: client(), server: w.formOf(host)}, nil
	})
}

// skewedStream is a stream between a client and a server of some forms.
type skewedStream struct {
	grpc.ClientStream
	world          *world
	name           string // of the client
	host           string // of the server
	client, server form
	received       int
}

// unknownField is the number of a field that this tree does not know, and unknownCapability a
// capability.
const unknownField, unknownCapability = 1000, 1000

func addUnknown(m proto.Message) {
	r := m.ProtoReflect()
	b := protowire.AppendTag(r.GetUnknown(), unknownField, protowire.BytesType)
	r.SetUnknown(protowire.AppendString(b, "of a later version"))
}

// SendMsg implements grpc.ClientStream.
func (s *skewedStream) SendMsg(m any) error {
	r, ok := m.(*pb.StreamRequest)
	lie := s.world.lieOf(s.host).about
	if !ok || s.client == present && s.server == present && lie == 0 {
		return s.ClientStream.SendMsg(m)
	}
	r = proto.CloneOf(r)
	if h := r.GetHello(); h != nil && lie != 0 { // nothing is compressed that is to be changed
		h.Capabilities = slices.DeleteFunc(h.Capabilities, func(c pb.Capability) bool { return c == pb.Capability_CAPABILITY_ZSTD })
		if lie&forges != 0 { // everything is sent anew
			h.Epoch, h.Sequences, h.Digest = 0, nil, nil
		}
	}
	if h := r.GetHello(); h != nil && (s.client == older || s.server == older) {
		h.Probe, h.Capabilities = false, nil
	}
	if s.client == newer {
		addUnknown(r)
		if h := r.GetHello(); h != nil {
			addUnknown(h)
			if s.server != older {
				h.Capabilities = append(h.Capabilities, unknownCapability)
			}
		}
	}
	return s.ClientStream.SendMsg(r)
}

// These are the fields of StreamResponse whose content differs, by their tags.
var (
	welcomeTag   = protowire.AppendTag(nil, 1, protowire.BytesType)[0]
	heartbeatTag = protowire.AppendTag(nil, 5, protowire.BytesType)[0]
	zstdTag      = protowire.AppendTag(nil, 9, protowire.BytesType)[0]
)

// RecvMsg implements grpc.ClientStream.
func (s *skewedStream) RecvMsg(m any) error {
	if err := s.ClientStream.RecvMsg(m); err != nil {
		return err
	}
	f, ok := m.(*wire.Frame)
	if !ok || len(*f) == 0 {
		return nil
	}
	var r pb.StreamResponse
	lied := false
	if l := s.world.lieOf(s.host); l.about != 0 && (*f)[0] != zstdTag {
		if err := proto.Unmarshal(*f, &r); err != nil {
			return err
		}
		s.received++
		lied = l.tell(&r, s.received)
		b, err := proto.Marshal(&r)
		if *f = b; err != nil {
			return err
		}
	}
	s.world.believe(s.name, s.host, lied)
	if s.server == present && s.client != older || (*f)[0] != welcomeTag && (*f)[0] != heartbeatTag {
		return nil
	}
	if err := proto.Unmarshal(*f, &r); err != nil {
		return err
	}
	w, h := r.GetWelcome(), r.GetHeartbeat()
	if w != nil && s.server != present {
		w.ServerVersion = s.server.String()
	}
	if s.server == newer {
		addUnknown(&r)
		if w != nil {
			addUnknown(w)
		} else {
			addUnknown(h)
		}
	}
	if s.server == older || s.client == older {
		if w != nil {
			w.StaleMs = 0
		} else {
			h.StaleMs = nil
		}
	}
	b, err := proto.Marshal(&r)
	*f = b
	return err
}

// decode returns how an agent of a form decodes frames.
func (f form) decode() func(wire.Frame) (*wire.Response, error) {
	if f != older {
		return wire.Decode
	}
	return func(frame wire.Frame) (*wire.Response, error) {
		r, err := wire.Decode(frame)
		if err != nil {
			return nil, err
		}
		if r.Update != nil {
			for i, s := range r.Update.Services {
				r.Update.Services[i] = f.known(s)
				if version := s.ContentVersion(); version != r.Update.Services[i].ContentVersion() {
					r.Update.Unverified = append(r.Update.Unverified, model.Unverified{Key: s.Key(), Version: version})
				}
			}
		}
		return r, nil
	}
}

// known returns what an agent of a form knows of a Service.
func (f form) known(s *model.Service) *model.Service {
	if f != older {
		return s
	}
	o := *s
	o.IPVSScheduler = ""
	return model.NewService(o)
}

// hasOlder reports whether a part that does not know of staleness runs.
func (w *world) hasOlder() bool {
	for _, n := range w.nodes {
		if n.form == older {
			return true
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for f := range maps.Values(w.forms) {
		if f == older {
			return true
		}
	}
	return false
}
