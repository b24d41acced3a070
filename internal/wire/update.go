package wire

import (
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// These constants bound the memory that a frame can make its receiver use. Two bytes of a frame can
// encode an endpoint, which takes a hundred times as much memory, and compression can shrink a
// frame to a thousandth. Canonical content stays far below all bounds.
const (
	// maxSeveral bounds, in bytes, a frame that holds several objects or none. What a part holds
	// besides its objects is small.
	maxSeveral = MaxPart + 64<<10
	// maxNode bounds, in bytes, a frame that holds a Node. An API server accepts Nodes of up to 1.5
	// MiB.
	maxNode = 2 * MaxPart
	// maxProblems bounds the number of objects in a frame that do not decode. The shortest object
	// with a name and a version has 33 bytes.
	maxProblems = 1 << 15
	// maxFields bounds the number of entries in all lists of an object. A Service may have 70,000
	// and a slice 36,000.
	maxFields = 1 << 17
	// fewBytes is the size, in bytes, up to which an object's entries need not be counted.
	fewBytes = 64 << 10
	// maxName bounds, in bytes, the names that are kept of objects that do not decode. No object of
	// Kubernetes has a longer name.
	maxName = 253
)

// updateDecoder decodes an update object by object, so that the message of one object is garbage
// before the next one is decoded.
type updateDecoder struct {
	update   *model.Update
	problems []Problem
	bytes    int // size of the update
	objects  int
	more     bool
}

// decodeUpdate decodes an update. Objects that do not decode are left out of it and become its
// Problems.
func decodeUpdate(b []byte) (*Response, error) {
	d := updateDecoder{update: &model.Update{}, bytes: len(b)}
	if err := fields(b, d.field); err != nil {
		return nil, err
	}
	d.update.From = fromOf(d.update)
	return &Response{Update: d.update, Problems: d.problems, More: d.more}, nil
}

// fromOf returns the From of an update as it was sent. Of a partial one, 0 means To-1.
func fromOf(u *model.Update) uint64 {
	if u.From == 0 && !u.Full && u.To > 0 {
		return u.To - 1
	}
	return u.From
}

// setPosition sets what a field says of the place of the update, and returns false for other
// fields.
func setPosition(u *model.Update, field wireField, v wireValue) bool {
	switch field {
	case shardField:
		u.Shard = uint32(v.number)
	case fromField:
		u.From = v.number
	case toField:
		u.To = v.number
	case servicesField:
		u.ResourceVersions.Services = v.number
	case slicesField:
		u.ResourceVersions.Slices = v.number
	default:
		return false
	}
	return true
}

// field decodes one field of the update. It ignores fields that this version does not know.
func (d *updateDecoder) field(field wireField, v wireValue) error {
	u := d.update
	if setPosition(u, field, v) {
		return nil
	}
	switch field {
	case fullField:
		u.Full = v.number != 0
	case moreField:
		d.more = v.number != 0
	case bucketField:
		return d.bucket(v.number)
	case bucketsField:
		for b := v.bytes; len(b) > 0; {
			bucket, n := protowire.ConsumeVarint(b)
			if n < 0 {
				return protowire.ParseError(n)
			}
			if err := d.bucket(bucket); err != nil {
				return err
			}
			b = b[n:]
		}
	case serviceField:
		return object(d, v.bytes, &u.Services, model.KindService, 0, &pb.Service{}, d.service)
	case sliceField:
		return object(d, v.bytes, &u.Slices, model.KindSlice, sliceEndpoints, &pb.Slice{}, d.slice)
	case deltasField:
		return object(d, v.bytes, &u.Deltas, model.KindSlice, deltaEndpoints, &pb.SliceDelta{}, deltaFromProto)
	case keyField:
		p := &pb.ObjectKey{}
		if err := d.unmarshal(v.bytes, 0, p); err != nil {
			return err
		}
		m, err := removedFromProto(p)
		if err != nil {
			return d.bad(m, nil, false, err)
		}
		u.Removed = append(u.Removed, m)
	}
	return nil
}

// versioned is the message of an object with a name and a version.
type versioned interface {
	proto.Message
	GetNamespace() string
	GetName() string
	GetVersion() []byte
}

// object decodes an object and appends it to a list. p is an empty message for it; nested is as for
// unmarshal. An object that does not convert becomes a problem.
func object[P versioned, M any](d *updateDecoder, b []byte, to *[]M, kind model.Kind, nested protowire.Number, p P, convert func(P) (M, error)) error {
	if err := d.unmarshal(b, nested, p); err != nil {
		return err
	}
	m, err := convert(p)
	if err != nil {
		return d.bad(model.Key{Kind: kind, Namespace: p.GetNamespace(), Name: p.GetName()}, p.GetVersion(), nested == deltaEndpoints, err)
	}
	*to = append(*to, m)
	return nil
}

func (d *updateDecoder) bucket(n uint64) error {
	if len(d.update.FullBuckets) == model.Buckets {
		return errBuckets
	}
	d.update.FullBuckets = append(d.update.FullBuckets, uint32(n))
	return nil
}

// unmarshal decodes the message of an object, or returns an error if the object has too many
// entries. nested is the number of the field whose messages have lists of their own, or 0.
func (d *updateDecoder) unmarshal(b []byte, nested protowire.Number, p proto.Message) error {
	d.objects++
	if d.objects > 1 && d.bytes > maxSeveral {
		return errObjects
	}
	if len(b) > fewBytes {
		count := 0
		var counted func(wireField, wireValue) error
		counted = func(field wireField, v wireValue) error {
			if count++; count > maxFields {
				return errFields
			}
			if field == (wireField{nested, protowire.BytesType}) {
				return fields(v.bytes, func(wireField, wireValue) error { return counted(wireField{}, wireValue{}) })
			}
			return nil
		}
		if err := fields(b, counted); err != nil {
			return err
		}
	}
	return proto.Unmarshal(b, p)
}

// bad leaves out an object that does not decode. The client reports its key to other servers, so an
// object whose key is too long or empty gets no version and is not tracked.
func (d *updateDecoder) bad(key model.Key, version []byte, delta bool, err error) error {
	if len(d.problems) == maxProblems {
		return errProblems
	}
	v, _ := model.ParseVersion(version) // zero if the version does not parse either
	if key.Name == "" || len(key.Name) > maxName || len(key.Namespace) > maxName {
		key.Namespace, key.Name, v = clip(key.Namespace), clip(key.Name), model.Version{}
	}
	d.problems = append(d.problems, Problem{key, err})
	d.update.Unreadable = append(d.update.Unreadable, model.Unreadable{Key: key, Version: v, Delta: delta})
	return nil
}

// clip returns the first maxName bytes of a name, without keeping the memory of the rest.
func clip(name string) string { return strings.Clone(name[:min(len(name), maxName)]) }
