package checkpoint

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/proto"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// A checkpoint file has this format, with big-endian numbers:
//
//	magic       8 bytes
//	format      uint32
//	written     int64, milliseconds since 1970
//	sections    uint32, number of sections, each of which has:
//	              size    uint32, bytes of the content
//	              stored  uint32, bytes of the compressed content
//	              the content, compressed with zstd
//	checksum    uint64, xxhash64 of all bytes before it
//
// The contents are messages of the wire API, in this order:
//
//  1. A Hello, which says whose cache it is and has the positions.
//  2. Servers.
//  3. Servers whose addresses are the names that the certificates of these servers must have, in
//     the same order.
//  4. A frame with the Node.
//  5. For each shard in order, the frames of an Update with the whole shard, one frame in each
//     section.
//
// The frames of shards have no sequences, so that they stay the same while their objects do. The
// Hello has the sequences.
const (
	fileMagic     = "slicekpt"
	fileFormat    = 3
	fileHeader    = len(fileMagic) + 4 + 8 + 4
	sectionHeader = 4 + 4
	checksumSize  = 8
)

// sectionShards is the number of sections before those of the shards.
const sectionShards = 4

// These constants bound what is read. A cluster of a million endpoints has a file of about 20 MB.
const (
	maxFile = 256 << 20
	// maxServers bounds the number of servers that a checkpoint may name.
	maxServers = 1024
)

// encoder encodes checkpoints of one cache.
//
// Invariants:
//
//  1. shards holds, for each shard, the compressed sections of its revision that was encoded last.
//     A shard is compressed again only if it has changed.
//  2. Sections never change once they are encoded, so a caller may keep them.
type encoder struct {
	zstd   *zstd.Encoder
	shards []encodedShard
}

type encodedShard struct {
	revision uint64
	sections [][]byte
}

func newEncoder() *encoder {
	// Each section is compressed by itself, so a small window costs nothing for a shard that fits
	// in it. A better ratio is not worth a node's memory and CPU.
	e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithLowerEncoderMem(true),
		zstd.WithWindowSize(1<<20), zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithZeroFrames(true),
		zstd.WithEncoderCRC(false))
	if err != nil {
		panic(err) // the options contradict each other
	}
	return &encoder{zstd: e}
}

// lacks reports whether this revision of a shard has not been compressed yet.
func (e *encoder) lacks(shard int, revision uint64) bool {
	return shard >= len(e.shards) || e.shards[shard].sections == nil || e.shards[shard].revision != revision
}

// section returns the encoded section with this content.
func (e *encoder) section(content []byte) []byte {
	out := e.zstd.EncodeAll(content, make([]byte, sectionHeader, sectionHeader+len(content)/4))
	binary.BigEndian.PutUint32(out, uint32(len(content)))
	binary.BigEndian.PutUint32(out[4:], uint32(len(out)-sectionHeader))
	return bytes.Clone(out) // the clone has no spare capacity, since it is kept
}

// encode returns the sections of a node's checkpoint. The contents must have the shards that the
// encoder lacks.
func (e *encoder) encode(node string, c *cache.Contents) ([][]byte, error) {
	sections, err := e.encodeHead(node, c)
	if err != nil {
		return nil, err
	}
	shards := make([]encodedShard, len(c.Shards))
	copy(shards, e.shards)
	e.shards = shards
	for i, u := range c.Shards {
		if u != nil {
			if e.shards[i], err = e.encodeShard(u, c.Revisions[i]); err != nil {
				return nil, err
			}
		}
		sections = append(sections, e.shards[i].sections...)
	}
	return sections, nil
}

// encodeHead returns the sections before those of the shards.
func (e *encoder) encodeHead(node string, c *cache.Contents) (sections [][]byte, err error) {
	servers, names := &pb.Servers{}, &pb.Servers{}
	for _, s := range c.Servers {
		servers.Servers = append(servers.Servers, &pb.Server{Address: s.Address})
		names.Servers = append(names.Servers, &pb.Server{Address: s.Name})
	}
	for _, m := range []proto.Message{
		&pb.Hello{
			NodeName: node, Epoch: c.Epoch, Sequences: c.Sequences,
			ResourceVersions: wire.ResourceVersionsToProto(c.ResourceVersions),
		}, servers, names,
	} {
		content, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
		if err != nil {
			return nil, fmt.Errorf("encode %T: %w", m, err)
		}
		sections = append(sections, e.section(content))
	}
	frame, err := wire.EncodeNode(node, c.Node, 0)
	if err != nil {
		return nil, err
	}
	return append(sections, e.section(frame)), nil
}

func (e *encoder) encodeShard(u *model.Update, revision uint64) (encodedShard, error) {
	// Sorting puts similar objects next to each other, which improves compression.
	slices.SortFunc(u.Services, func(a, b *model.Service) int { return a.Key().Compare(b.Key()) })
	slices.SortFunc(u.Slices, func(a, b *model.Slice) int { return a.Key().Compare(b.Key()) })
	frames, err := wire.EncodeParts(u)
	if err != nil {
		return encodedShard{}, err
	}
	out := encodedShard{revision: revision}
	for _, f := range frames {
		out.sections = append(out.sections, e.section(f))
	}
	return out, nil
}

// writeFile writes a checkpoint with these sections and returns its size in bytes.
func writeFile(to io.Writer, written time.Time, sections [][]byte) (size int, err error) {
	sum := xxhash.New()
	write := func(b []byte) {
		if err == nil {
			var n int
			n, err = to.Write(b)
			size += n
		}
		_, _ = sum.Write(b) // it never fails
	}
	header := append(make([]byte, 0, fileHeader), fileMagic...)
	header = binary.BigEndian.AppendUint32(header, fileFormat)
	header = binary.BigEndian.AppendUint64(header, uint64(written.UnixMilli()))
	header = binary.BigEndian.AppendUint32(header, uint32(len(sections)))
	write(header)
	for _, s := range sections {
		write(s)
	}
	write(binary.BigEndian.AppendUint64(nil, sum.Sum64()))
	return size, err
}

// decode decodes the checkpoint of a node, whole or not at all. A rejected checkpoint costs only a
// snapshot, so salvaging parts of a damaged file is not worth its risk. Cache.Restore checks the
// rest.
func decode(file []byte, node string) (out *cache.Contents, written time.Time, err error) {
	r, written, err := openFile(file)
	if err != nil {
		return nil, written, err
	}
	defer r.zstd.Close()
	if out, err = r.head(node); err != nil {
		return nil, written, err
	}
	for i := range out.Sequences {
		u, err := r.shard(uint32(i))
		if err != nil {
			return nil, written, fmt.Errorf("shard %d: %w", i, err)
		}
		out.Shards = append(out.Shards, u)
	}
	switch {
	case r.read != r.sections:
		return nil, written, fmt.Errorf("file has %d sections, but its last shard ends with section %d", r.sections, r.read)
	case len(r.rest) > 0:
		return nil, written, fmt.Errorf("%d bytes follow the last section", len(r.rest))
	}
	return out, written, nil
}

// sectionReader reads the sections in order. rest begins with the section after the read ones.
type sectionReader struct {
	rest     []byte
	sections uint32 // number of sections that the file claims to have
	read     uint32 // number of sections read so far
	zstd     *zstd.Decoder
}

// openFile checks the magic, the format and the checksum. It returns a reader of the sections, and
// when the file was written.
func openFile(file []byte) (r *sectionReader, written time.Time, err error) {
	switch {
	case len(file) < fileHeader+checksumSize:
		return nil, written, fmt.Errorf("file is truncated: it has %d bytes", len(file))
	case !bytes.HasPrefix(file, []byte(fileMagic)):
		return nil, written, errors.New("not a checkpoint file")
	}
	header := file[len(fileMagic):]
	if format := binary.BigEndian.Uint32(header); format != fileFormat {
		return nil, written, fmt.Errorf("file has format %d, but this version reads only format %d", format, fileFormat)
	}
	body, sum := file[:len(file)-checksumSize], binary.BigEndian.Uint64(file[len(file)-checksumSize:])
	if xxhash.Sum64(body) != sum {
		return nil, written, errors.New("checksum mismatch")
	}
	// content bounds the size of what is decompressed.
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecodeAllCapLimit(true))
	if err != nil {
		panic(err) // the options contradict each other
	}
	r = &sectionReader{rest: body[fileHeader:], sections: binary.BigEndian.Uint32(header[12:]), zstd: decoder}
	return r, time.UnixMilli(int64(binary.BigEndian.Uint64(header[4:]))), nil
}

// content returns the decompressed content of the next section.
func (r *sectionReader) content() ([]byte, error) {
	if len(r.rest) < sectionHeader {
		return nil, io.ErrUnexpectedEOF
	}
	size, stored := binary.BigEndian.Uint32(r.rest), binary.BigEndian.Uint32(r.rest[4:])
	r.rest = r.rest[sectionHeader:]
	r.read++
	switch {
	case uint64(stored) > uint64(len(r.rest)):
		return nil, io.ErrUnexpectedEOF
	case size > wire.MaxFrame:
		return nil, fmt.Errorf("section of %d bytes claims %d uncompressed bytes", stored, size)
	}
	content, err := r.zstd.DecodeAll(r.rest[:stored], make([]byte, 0, size))
	if err != nil {
		return nil, err
	}
	if len(content) != int(size) {
		return nil, fmt.Errorf("section has %d uncompressed bytes, not %d", len(content), size)
	}
	r.rest = r.rest[stored:]
	return content, nil
}

// message decodes the next section, whose name errors state, into m.
func (r *sectionReader) message(name string, m proto.Message) error {
	content, err := r.content()
	if err == nil {
		err = proto.Unmarshal(content, m)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// response returns the decoded frame in the next section. It returns an error if the frame holds an
// object that does not decode.
func (r *sectionReader) response() (*wire.Response, error) {
	content, err := r.content()
	if err != nil {
		return nil, err
	}
	response, err := wire.Decode(content)
	if err != nil {
		return nil, err
	}
	for _, p := range response.Problems {
		return nil, fmt.Errorf("%v: %w", p.Key, p.Err)
	}
	return response, nil
}

// head reads the sections before those of the shards.
func (r *sectionReader) head(node string) (*cache.Contents, error) {
	hello, servers, names := &pb.Hello{}, &pb.Servers{}, &pb.Servers{}
	if err := r.message("hello", hello); err != nil {
		return nil, err
	}
	if err := r.checkHello(hello, node); err != nil {
		return nil, err
	}
	if err := r.message("servers", servers); err != nil {
		return nil, err
	}
	if err := r.message("names of servers", names); err != nil {
		return nil, err
	}
	if n := len(servers.GetServers()); n > maxServers || n != len(names.GetServers()) {
		return nil, fmt.Errorf("file has %d servers and %d names, at most %d are allowed",
			n, len(names.GetServers()), maxServers)
	}
	update, err := r.response()
	switch {
	case err != nil:
		return nil, fmt.Errorf("node: %w", err)
	case update.Node == nil:
		return nil, errors.New("node: section has no Node")
	}
	out := &cache.Contents{
		Epoch: hello.GetEpoch(), Sequences: hello.GetSequences(),
		ResourceVersions: wire.ResourceVersionsFromProto(hello.GetResourceVersions()),
		Node:             update.Node.Node,
	}
	for i, s := range servers.GetServers() {
		out.Servers = append(out.Servers, cache.Server{Address: s.GetAddress(), Name: names.GetServers()[i].GetAddress()})
	}
	return out, nil
}

// checkHello checks the node name, and what decoding the other sections relies on.
func (r *sectionReader) checkHello(h *pb.Hello, node string) error {
	shards := len(h.GetSequences())
	switch {
	case h.GetNodeName() != node:
		return fmt.Errorf("file is for node %q, but this node is %q", h.GetNodeName(), node)
	case h.GetEpoch() == 0 || !cache.ValidShards(shards):
		return fmt.Errorf("file has epoch %d and %d sequences", h.GetEpoch(), shards)
	case r.sections < uint32(sectionShards+shards):
		return fmt.Errorf("file has %d sections for %d shards", r.sections, shards)
	}
	return nil
}

// shard reads all sections of a shard and returns them as one Update.
func (r *sectionReader) shard(shard uint32) (*model.Update, error) {
	whole := &model.Update{Shard: shard, Full: true}
	for more := true; more; {
		response, err := r.response()
		if err != nil {
			return nil, err
		}
		u := response.Update
		if u == nil || u.Shard != shard || !u.Full || len(u.Deltas) > 0 || len(u.Removed) > 0 {
			return nil, errors.New("section is not part of a whole shard")
		}
		whole.Services = append(whole.Services, u.Services...)
		whole.Slices = append(whole.Slices, u.Slices...)
		whole.Unverified = append(whole.Unverified, u.Unverified...)
		more = response.More
	}
	return whole, nil
}
