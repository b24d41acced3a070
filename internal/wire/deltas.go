package wire

import (
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/slicecast/slicecast/internal/model"
)

// decodeDeltas decodes an update that holds only deltas without new endpoints. It returns nil for
// every other frame, including invalid ones.
//
// Such an update is what a node receives when pods become ready or unready, and what it should
// program as fast as possible. The general decoder takes several times as long, above all when it
// has not run for a while.
func decodeDeltas(f Frame) *Response {
	if len(f) > maxSeveral {
		return nil
	}
	u, size := &model.Update{}, 0
	ok := eachField(f, func(field wireField, v wireValue) bool {
		if field != (wireField{responseShardUpdate, protowire.BytesType}) || size > 0 {
			return false
		}
		size = len(v.bytes)
		return eachField(v.bytes, func(field wireField, v wireValue) bool {
			switch field {
			case shardField:
				u.Shard = uint32(v.number)
			case fromField:
				u.From = v.number
			case toField:
				u.To = v.number
			case deltasField:
				d := decodeDelta(v.bytes)
				u.Deltas = append(u.Deltas, d)
				return d != nil
			case servicesField:
				u.ResourceVersions.Services = v.number
			case slicesField:
				u.ResourceVersions.Slices = v.number
			default:
				return false
			}
			return true
		})
	})
	if !ok || len(u.Deltas) == 0 {
		return nil
	}
	if u.From == 0 && u.To > 0 {
		u.From = u.To - 1
	}
	return &Response{Update: u, Size: size}
}

// Fields of ShardUpdate, SliceDelta and EndpointConditions.
var (
	shardField    = wireField{1, protowire.VarintType}
	fromField     = wireField{2, protowire.VarintType}
	toField       = wireField{3, protowire.VarintType}
	fullField     = wireField{4, protowire.VarintType}
	serviceField  = wireField{updateServices, protowire.BytesType}
	sliceField    = wireField{updateSlices, protowire.BytesType}
	deltasField   = wireField{updateDeltas, protowire.BytesType}
	keyField      = wireField{updateRemoved, protowire.BytesType}
	servicesField = wireField{9, protowire.VarintType}
	moreField     = wireField{10, protowire.VarintType}
	bucketField   = wireField{11, protowire.VarintType}
	bucketsField  = wireField{11, protowire.BytesType}
	slicesField   = wireField{12, protowire.VarintType}

	namespaceField  = wireField{1, protowire.BytesType}
	nameField       = wireField{2, protowire.BytesType}
	versionField    = wireField{3, protowire.BytesType}
	conditionsField = wireField{5, protowire.BytesType}
	removedField    = wireField{6, protowire.BytesType}
	triggerField    = wireField{7, protowire.VarintType}

	readyField       = wireField{2, protowire.VarintType}
	servingField     = wireField{3, protowire.VarintType}
	terminatingField = wireField{4, protowire.VarintType}
	indexField       = wireField{1, protowire.VarintType}
)

// Fields of Slice and SliceDelta that hold endpoints.
const (
	sliceEndpoints protowire.Number = 7
	deltaEndpoints protowire.Number = 4
)

// decodeDelta decodes one delta. It returns nil if the delta is invalid or holds any other field.
func decodeDelta(b []byte) *model.SliceDelta {
	m := &model.SliceDelta{Endpoints: []model.Endpoint{}}
	var d decoder
	ok := eachField(b, func(field wireField, v wireValue) bool {
		switch field {
		case namespaceField:
			m.Namespace = common.Get(string(v.bytes))
		case nameField:
			m.Name = string(v.bytes)
		case versionField:
			m.Version = d.version(v.bytes)
		case triggerField:
			m.LastChangeTriggerTimeMS = int64(v.number)
		case conditionsField:
			c, ok := decodeConditions(v.bytes)
			m.Conditions = append(m.Conditions, c)
			return ok && len(m.Conditions) <= model.MaxEndpoints
		case removedField:
			m.Removed = append(m.Removed, d.addr("removed", string(v.bytes)))
			return d.err == nil && len(m.Removed) <= model.MaxEndpoints
		default:
			return false
		}
		return true
	})
	d.there(m.Version)
	if !ok || d.check(m) != nil {
		return nil
	}
	return m
}

func decodeConditions(b []byte) (c model.EndpointConditions, ok bool) {
	ok = eachField(b, func(field wireField, v wireValue) bool {
		switch field {
		case indexField:
			c.Index = uint32(v.number)
		case readyField:
			c.Conditions.Ready = v.number != 0
		case servingField:
			c.Conditions.Serving = v.number != 0
		case terminatingField:
			c.Conditions.Terminating = v.number != 0
		default:
			return false
		}
		return true
	})
	return c, ok
}

type wireField struct {
	number protowire.Number
	kind   protowire.Type
}

type wireValue struct {
	number uint64
	bytes  []byte
}

// eachField calls take for each field of b until take returns false. It reports whether b is valid
// and take returned true for every field.
func eachField(b []byte, take func(wireField, wireValue) bool) bool {
	for len(b) > 0 {
		field, v, n := nextField(b)
		if n < 0 || !take(field, v) {
			return false
		}
		b = b[n:]
	}
	return true
}

func fields(b []byte, take func(wireField, wireValue) error) error {
	for len(b) > 0 {
		field, v, n := nextField(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		if err := take(field, v); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// nextField returns the first field of b and its length, or an error of protowire as a negative
// length. Fields of other types than numbers and bytes have a zero value.
func nextField(b []byte) (field wireField, v wireValue, length int) {
	number, kind, n := protowire.ConsumeTag(b)
	if n < 0 {
		return field, v, n
	}
	var m int
	switch kind {
	case protowire.VarintType:
		v.number, m = protowire.ConsumeVarint(b[n:])
	case protowire.BytesType:
		v.bytes, m = protowire.ConsumeBytes(b[n:])
	default:
		m = protowire.ConsumeFieldValue(number, kind, b[n:])
	}
	if m < 0 {
		return field, v, m
	}
	return wireField{number, kind}, v, n + m
}
