package wire

import (
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/slicecast/slicecast/internal/model"
)

// decodeDeltas decodes an update that holds only deltas without new endpoints. It returns nil for
// every other update, including invalid ones.
//
// Such an update is what a node receives when pods become ready or unready, and what it should
// program as fast as possible. The general decoder takes several times as long, above all when it
// has not run for a while.
func decodeDeltas(b []byte) *Response {
	if len(b) > maxSeveral {
		return nil
	}
	u := &model.Update{}
	err := fields(b, func(field wireField, v wireValue) (err error) {
		switch {
		case field == deltasField:
			var d *model.SliceDelta
			d, err = decodeDelta(v.bytes)
			u.Deltas = append(u.Deltas, d)
		case !setPosition(u, field, v):
			err = errGeneral
		}
		return err
	})
	if err != nil || len(u.Deltas) == 0 {
		return nil
	}
	u.From = fromOf(u)
	return &Response{Update: u}
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

// decodeDelta decodes one delta. It returns an error if the delta is invalid or holds any other
// field.
func decodeDelta(b []byte) (*model.SliceDelta, error) {
	m := &model.SliceDelta{Endpoints: []model.Endpoint{}}
	var d decoder
	err := fields(b, func(field wireField, v wireValue) (err error) {
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
			var c model.EndpointConditions
			c, err = decodeConditions(v.bytes)
			m.Conditions = append(m.Conditions, c)
		case removedField:
			m.Removed = append(m.Removed, d.addr("removed", string(v.bytes)))
			err = d.err
		default:
			err = errGeneral
		}
		if len(m.Conditions) > model.MaxEndpoints || len(m.Removed) > model.MaxEndpoints {
			return errGeneral // at once, as a few bytes of a frame hold millions of fields
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	d.there(m.Version)
	return m, d.check(m)
}

func decodeConditions(b []byte) (c model.EndpointConditions, err error) {
	err = fields(b, func(field wireField, v wireValue) error {
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
			return errGeneral
		}
		return nil
	})
	return c, err
}

type wireField struct {
	number protowire.Number
	kind   protowire.Type
}

// wireValue is the value of a field: a number or bytes, according to the field's kind. Values of
// other kinds are neither.
type wireValue struct {
	number uint64
	bytes  []byte
}

// fields calls visit for each field of a message, and returns the first error.
func fields(b []byte, visit func(wireField, wireValue) error) error {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		var v wireValue
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
			return protowire.ParseError(m)
		}
		b = b[n+m:]
		if err := visit(wireField{number, kind}, v); err != nil {
			return err
		}
	}
	return nil
}
