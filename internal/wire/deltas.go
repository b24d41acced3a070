package wire

import (
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/slicecast/slicecast/internal/model"
)

// decodeDeltas decodes an update of deltas in which no endpoint comes: what a node hears of when pods turn ready or not, and what it is to
// program as fast as can be. The general decoder takes several times as long, most of all where it has not run for a while. nil: f is anything
// else, which may be an error.
func decodeDeltas(f Frame) *model.Update {
	field, value, rest, ok := consume(f)
	if !ok || field != (wireField{responseShardUpdate, protowire.BytesType}) || len(rest) > 0 {
		return nil
	}
	u := &model.Update{}
	for body := value.bytes; len(body) > 0; {
		if field, value, body, ok = consume(body); !ok {
			return nil
		}
		switch field {
		case shardField:
			u.Shard = uint32(value.number)
		case fromField:
			u.From = value.number
		case toField:
			u.To = value.number
		case deltasField:
			d := decodeDelta(value.bytes)
			if d == nil {
				return nil
			}
			u.Deltas = append(u.Deltas, d)
		case versionsField:
			if !decodeVersions(value.bytes, &u.ResourceVersions) {
				return nil
			}
		default:
			return nil
		}
	}
	if len(u.Deltas) == 0 {
		return nil
	}
	if u.From == 0 && u.To > 0 {
		u.From = u.To - 1
	}
	return u
}

// The fields of ShardUpdate, SliceDelta, EndpointConditions and ResourceVersions that there may be.
var (
	shardField    = wireField{1, protowire.VarintType}
	fromField     = wireField{2, protowire.VarintType}
	toField       = wireField{3, protowire.VarintType}
	deltasField   = wireField{7, protowire.BytesType}
	versionsField = wireField{9, protowire.BytesType}

	namespaceField  = wireField{1, protowire.BytesType}
	nameField       = wireField{2, protowire.BytesType}
	baseField       = wireField{3, protowire.Fixed64Type}
	versionField    = wireField{4, protowire.Fixed64Type}
	conditionsField = wireField{6, protowire.BytesType}
	removedField    = wireField{7, protowire.BytesType}
	triggerField    = wireField{8, protowire.VarintType}

	readyField       = wireField{2, protowire.VarintType}
	servingField     = wireField{3, protowire.VarintType}
	terminatingField = wireField{4, protowire.VarintType}
	indexField       = wireField{5, protowire.VarintType}

	servicesField = wireField{1, protowire.VarintType}
	slicesField   = wireField{2, protowire.VarintType}
)

func decodeDelta(b []byte) *model.SliceDelta {
	m := &model.SliceDelta{Endpoints: []model.Endpoint{}}
	var d decoder
	for len(b) > 0 {
		field, value, rest, ok := consume(b)
		if !ok {
			return nil
		}
		b = rest
		switch field {
		case namespaceField:
			m.Namespace = common.Get(string(value.bytes))
		case nameField:
			m.Name = string(value.bytes)
		case baseField:
			m.Base = model.Version(value.number)
		case versionField:
			m.Version = model.Version(value.number)
		case triggerField:
			m.LastChangeTriggerTimeMS = int64(value.number)
		case conditionsField:
			c, ok := decodeConditions(value.bytes)
			if !ok {
				return nil
			}
			m.Conditions = append(m.Conditions, c)
		case removedField:
			m.Removed = append(m.Removed, d.addr("removed", string(value.bytes)))
		default:
			return nil
		}
	}
	d.name(m.Name)
	d.version(uint64(m.Version))
	if d.err != nil || !utf8.ValidString(m.Namespace) || !utf8.ValidString(m.Name) {
		return nil
	}
	inOrder(m)
	return m
}

func decodeConditions(b []byte) (c model.EndpointConditions, ok bool) {
	for len(b) > 0 {
		field, value, rest, ok := consume(b)
		if !ok {
			return c, false
		}
		b = rest
		switch field {
		case indexField:
			c.Index = uint32(value.number)
		case readyField:
			c.Conditions.Ready = value.number != 0
		case servingField:
			c.Conditions.Serving = value.number != 0
		case terminatingField:
			c.Conditions.Terminating = value.number != 0
		default:
			return c, false
		}
	}
	return c, true
}

func decodeVersions(b []byte, into *model.ResourceVersions) bool {
	for len(b) > 0 {
		field, value, rest, ok := consume(b)
		if !ok {
			return false
		}
		b = rest
		switch field {
		case servicesField:
			into.Services = value.number
		case slicesField:
			into.Slices = value.number
		default:
			return false
		}
	}
	return true
}

type wireField struct {
	number protowire.Number
	kind   protowire.Type
}

type wireValue struct {
	number uint64
	bytes  []byte
}

// consume takes a field from a message; ok is false if none of these kinds is there.
func consume(b []byte) (field wireField, value wireValue, rest []byte, ok bool) {
	number, kind, n := protowire.ConsumeTag(b)
	if n < 0 {
		return field, value, nil, false
	}
	b = b[n:]
	switch kind {
	case protowire.VarintType:
		value.number, n = protowire.ConsumeVarint(b)
	case protowire.Fixed64Type:
		value.number, n = protowire.ConsumeFixed64(b)
	case protowire.BytesType:
		value.bytes, n = protowire.ConsumeBytes(b)
	default:
		n = -1
	}
	if n < 0 {
		return field, value, nil, false
	}
	return wireField{number, kind}, value, b[n:], true
}
