package client

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
	checkpointMagic  = "slicekpt"
	checkpointFormat = 3
	checkpointHeader = len(checkpointMagic) + 4 + 8 + 4
	sectionHeader    = 4 + 4
	checksumSize     = 8
)

// Indexes of the sections. Those of the shards start at sectionShards.
const (
	sectionHello = iota
	sectionServers
	sectionNames
	sectionNode
	sectionShards
)

// These constants bound what is read. A cluster of a million endpoints has a file of about 20 MB.
const (
	maxCheckpoint = 256 << 20
	// maxServers bounds the number of servers that a checkpoint may name.
	maxServers = 1024
)

// checkpointEncoder encodes checkpoints of one cache. It keeps the compressed sections of each
// shard, so that it compresses only shards that have changed.
type checkpointEncoder struct {
	zstd   *zstd.Encoder
	shards []encodedShard
}

type encodedShard struct {
	revision uint64
	sections [][]byte
}

func newCheckpointEncoder() *checkpointEncoder {
	// Each section is compressed by itself, so a small window costs nothing for a shard that fits
	// in it. A better ratio is not worth a node's memory and CPU.
	e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithLowerEncoderMem(true), zstd.WithWindowSize(1<<20),
		zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithZeroFrames(true), zstd.WithEncoderCRC(false))
	if err != nil {
		panic(err) // the options contradict each other
	}
	return &checkpointEncoder{zstd: e}
}

// changed reports whether this revision of a shard has not been compressed yet.
func (e *checkpointEncoder) changed(shard uint32, revision uint64) bool {
	return int(shard) >= len(e.shards) || e.shards[shard].sections == nil || e.shards[shard].revision != revision
}

// section returns the encoded section with this content.
func (e *checkpointEncoder) section(content []byte) []byte {
	out := e.zstd.EncodeAll(content, make([]byte, sectionHeader, sectionHeader+len(content)/4))
	binary.BigEndian.PutUint32(out, uint32(len(content)))
	binary.BigEndian.PutUint32(out[4:], uint32(len(out)-sectionHeader))
	return bytes.Clone(out) // the clone has no spare capacity, since it is kept
}

// encode returns the sections of a checkpoint.
func (e *checkpointEncoder) encode(c *contents) ([][]byte, error) {
	hello, err := proto.Marshal(c.hello)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	list, err := proto.Marshal(c.servers)
	if err != nil {
		return nil, fmt.Errorf("encode the servers: %w", err)
	}
	names, err := proto.Marshal(c.names)
	if err != nil {
		return nil, fmt.Errorf("encode the names of servers: %w", err)
	}
	node, err := wire.EncodeNode(c.hello.GetNodeName(), c.node)
	if err != nil {
		return nil, err
	}
	sections := [][]byte{e.section(hello), e.section(list), e.section(names), e.section(node)}
	shards := make([]encodedShard, len(c.revisions))
	copy(shards, e.shards)
	e.shards = shards
	for i, revision := range c.revisions {
		if u := c.shards[uint32(i)]; u != nil {
			// Sorting puts similar objects next to each other, which improves compression.
			slices.SortFunc(u.Services, func(a, b *model.Service) int { return a.Key().Compare(b.Key()) })
			slices.SortFunc(u.Slices, func(a, b *model.Slice) int { return a.Key().Compare(b.Key()) })
			frames, err := wire.EncodeParts(u)
			if err != nil {
				return nil, err
			}
			e.shards[i] = encodedShard{revision: revision}
			for _, f := range frames {
				e.shards[i].sections = append(e.shards[i].sections, e.section(f))
			}
		}
		sections = append(sections, e.shards[i].sections...)
	}
	return sections, nil
}

// writeCheckpoint writes a checkpoint with these sections and returns its size in bytes.
func writeCheckpoint(to io.Writer, written time.Time, sections [][]byte) (size int, err error) {
	sum := xxhash.New()
	write := func(b []byte) {
		if err == nil {
			var n int
			n, err = to.Write(b)
			size += n
		}
		_, _ = sum.Write(b) // it never fails
	}
	header := append(make([]byte, 0, checkpointHeader), checkpointMagic...)
	header = binary.BigEndian.AppendUint32(header, checkpointFormat)
	header = binary.BigEndian.AppendUint64(header, uint64(written.UnixMilli()))
	header = binary.BigEndian.AppendUint32(header, uint32(len(sections)))
	write(header)
	for _, s := range sections {
		write(s)
	}
	write(binary.BigEndian.AppendUint64(nil, sum.Sum64()))
	return size, err
}

// decoded is the content of a checkpoint.
type decoded struct {
	written time.Time
	// cache holds the state and its positions. It has never been in sync.
	cache *Cache
}

// decodeCheckpoint decodes the checkpoint of a node, whole or not at all. A rejected checkpoint
// costs only a snapshot, so salvaging parts of a damaged file is not worth its risk.
func decodeCheckpoint(file []byte, node string) (*decoded, error) {
	r := &sectionReader{}
	out := &decoded{cache: NewCache()}
	var err error
	if out.written, err = r.open(file); err != nil {
		return nil, err
	}
	defer r.zstd.Close()
	hello := &pb.Hello{}
	if err := r.next(hello); err != nil {
		return nil, fmt.Errorf("hello: %w", err)
	}
	if err := r.checkHello(hello, node); err != nil {
		return nil, err
	}
	servers := &pb.Servers{}
	if err := r.next(servers); err != nil {
		return nil, fmt.Errorf("servers: %w", err)
	}
	if n := len(servers.GetServers()); n > maxServers {
		return nil, fmt.Errorf("it has %d servers", n)
	}
	names := &pb.Servers{}
	if err := r.next(names); err != nil {
		return nil, fmt.Errorf("names of servers: %w", err)
	}
	if n := len(names.GetServers()); n != len(servers.GetServers()) {
		return nil, fmt.Errorf("it has %d servers and %d names of them", len(servers.GetServers()), n)
	}
	for i, s := range servers.GetServers() {
		out.cache.servers = append(out.cache.servers, Server{Address: s.GetAddress(), Name: names.GetServers()[i].GetAddress()})
	}
	update, err := r.response()
	switch {
	case err != nil:
		return nil, fmt.Errorf("node: %w", err)
	case update.Node == nil:
		return nil, errors.New("node: it is no Node")
	}
	out.cache.epoch, out.cache.node = hello.GetEpoch(), update.Node.Node
	out.cache.seen = wire.ResourceVersionsFromProto(hello.GetResourceVersions())
	out.cache.subscription = hello.GetSubscription()
	out.cache.reshardLocked(uint32(len(hello.GetSequences())))
	for i := range out.cache.shards {
		if err := r.shard(out.cache, uint32(i)); err != nil {
			return nil, fmt.Errorf("shard %d: %w", i, err)
		}
		s := &out.cache.shards[i]
		s.sequence = hello.GetSequences()[i]
		// The writer may have been older software than the reader, so the digest decides.
		if s.useOwnVersions() {
			s.sequence = 0
		}
	}
	switch {
	case r.read != r.sections:
		return nil, fmt.Errorf("it has %d sections, and its last shard ends with the %dth", r.sections, r.read)
	case len(r.rest) > 0:
		return nil, fmt.Errorf("%d bytes follow its last section", len(r.rest))
	}
	return out, nil
}

// sectionReader reads the sections in order.
type sectionReader struct {
	rest     []byte
	sections uint32 // number of sections that the file claims to have
	read     uint32 // number of sections read so far
	zstd     *zstd.Decoder
}

// open checks the magic, the format and the checksum, and returns when the file was written.
func (r *sectionReader) open(file []byte) (written time.Time, err error) {
	switch {
	case len(file) < checkpointHeader+checksumSize:
		return written, fmt.Errorf("it is torn: it has %d bytes", len(file))
	case !bytes.HasPrefix(file, []byte(checkpointMagic)):
		return written, errors.New("it is no checkpoint")
	}
	header := file[len(checkpointMagic):]
	if format := binary.BigEndian.Uint32(header); format != checkpointFormat {
		return written, fmt.Errorf("it has the format %d, and this version reads %d", format, checkpointFormat)
	}
	body, sum := file[:len(file)-checksumSize], binary.BigEndian.Uint64(file[len(file)-checksumSize:])
	if xxhash.Sum64(body) != sum {
		return written, errors.New("it is torn or damaged: its checksum does not fit")
	}
	// content bounds the size of what is decompressed.
	if r.zstd, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecodeAllCapLimit(true)); err != nil {
		panic(err) // the options contradict each other
	}
	r.sections, r.rest = binary.BigEndian.Uint32(header[12:]), body[checkpointHeader:]
	return time.UnixMilli(int64(binary.BigEndian.Uint64(header[4:]))), nil
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
	case size > maxMessage:
		return nil, fmt.Errorf("%d bytes are said to hold %d", stored, size)
	}
	content, err := r.zstd.DecodeAll(r.rest[:stored], make([]byte, 0, size))
	if err != nil {
		return nil, err
	}
	if len(content) != int(size) {
		return nil, fmt.Errorf("it holds %d bytes instead of %d", len(content), size)
	}
	r.rest = r.rest[stored:]
	return content, nil
}

func (r *sectionReader) next(m proto.Message) error {
	content, err := r.content()
	if err != nil {
		return err
	}
	return proto.Unmarshal(content, m)
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

// checkHello checks the node name, the epoch and the number of shards, which decoding the other
// sections relies on.
func (r *sectionReader) checkHello(h *pb.Hello, node string) error {
	shards := len(h.GetSequences())
	switch {
	case h.GetNodeName() != node:
		return fmt.Errorf("it is of the node %q, and this is %q", h.GetNodeName(), node)
	case h.GetEpoch() == 0 || shards == 0 || shards > maxShards || shards&(shards-1) != 0:
		return fmt.Errorf("it has the epoch %d and %d sequences", h.GetEpoch(), shards)
	case r.sections < uint32(sectionShards+shards):
		return fmt.Errorf("it has %d sections for %d shards", r.sections, shards)
	}
	return nil
}

// shard reads all sections of a shard into a cache.
func (r *sectionReader) shard(into *Cache, shard uint32) error {
	s := &into.shards[shard]
	named := 0
	for more := true; more; {
		response, err := r.response()
		if err != nil {
			return err
		}
		u := response.Update
		if u == nil || u.Shard != shard || !u.Full || len(u.Deltas) > 0 || len(u.Removed) > 0 {
			return errors.New("it is not all of a shard and nothing else")
		}
		for _, service := range u.Services {
			if err := into.inShardLocked(shard, service); err != nil {
				return err
			}
			s.setService(service)
		}
		for _, slice := range u.Slices {
			if err := into.inShardLocked(shard, slice); err != nil {
				return err
			}
			s.setSlice(slice)
		}
		named += u.Len()
		more = response.More
	}
	if held := s.whole(shard).Len(); held != named {
		return fmt.Errorf("it names %d objects more than once", named-held)
	}
	return nil
}
