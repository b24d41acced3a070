// These tests prove that a checkpoint holds all of a cache, that no other file is accepted, and
// that saving neither loses the file before nor holds up the agent.
package checkpoint

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/slicecast/slicecast/agent/client/cache"
	"github.com/slicecast/slicecast/internal/logtest"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is the timeout for steps that take milliseconds on an idle machine.
const patience = 60 * time.Second

var named = modeltest.NamedSlice

// inSyncWith returns a cache that a server with these objects has brought in sync, and its Writer.
func inSyncWith(t require.TestingT, epoch uint64, shards uint32, node *model.Node, objects ...model.Object) *cache.Writer {
	return bringInSync(t, cache.New(), epoch, shards, node, objects...)
}

// bringInSync does the same with an unused cache.
func bringInSync(t require.TestingT, c *cache.Cache, epoch uint64, shards uint32, node *model.Node, objects ...model.Object) *cache.Writer {
	w := &cache.Writer{Cache: c}
	require.NoError(t, w.Welcome(epoch, shards))
	var sequences []uint64
	for i := range shards {
		u := &model.Update{Shard: i, To: uint64(i) + 100, Full: true}
		for _, o := range objects {
			if o.ServiceKey().Shard(shards) != i {
				continue
			}
			switch o := o.(type) {
			case *model.Service:
				u.Services = append(u.Services, o)
			case *model.Slice:
				u.Slices = append(u.Slices, o)
			}
		}
		_, err := w.Apply(u)
		require.NoError(t, err)
		sequences = append(sequences, u.To)
	}
	w.SetNode(node)
	require.NoError(t, w.InSync(sequences, model.ResourceVersions{Services: 11, Slices: 12}))
	return w
}

// small returns a cache with few objects.
func small(t require.TestingT) *cache.Writer { return fillSmall(t, cache.New()) }

// fillSmall brings an unused cache in sync with few objects.
func fillSmall(t require.TestingT, c *cache.Cache) *cache.Writer {
	web := modeltest.WebSlice(3)
	return bringInSync(t, c, 7, 2, &model.Node{Name: "node-1", Labels: map[string]string{"zone": "a"}}, modeltest.Web(), model.NewSlice(web))
}

// encoded returns the checkpoint file of a node with these contents.
func encoded(t require.TestingT, c *cache.Contents) []byte {
	sections, err := newEncoder().encode("node-1", c)
	require.NoError(t, err)
	var b bytes.Buffer
	size, err := writeFile(&b, time.UnixMilli(1234), sections)
	require.NoError(t, err)
	require.Equal(t, b.Len(), size)
	return b.Bytes()
}

// everything returns all contents of a cache, even if the cache has never been in sync.
func everything(t require.TestingT, c *cache.Cache) *cache.Contents {
	if held := c.Status(); !held.InSync {
		require.NoError(t, (&cache.Writer{Cache: c}).InSync(held.Sequences, held.ResourceVersions))
	}
	all := c.Contents(func(int, uint64) bool { return true })
	sortObjects(all)
	return all
}

func sortObjects(c *cache.Contents) {
	for _, u := range c.Shards {
		slices.SortFunc(u.Services, func(a, b *model.Service) int { return a.Key().Compare(b.Key()) })
		slices.SortFunc(u.Slices, func(a, b *model.Slice) int { return a.Key().Compare(b.Key()) })
	}
}

// restored returns a cache that starts with these contents.
func restored(t require.TestingT, c *cache.Contents) *cache.Cache {
	out := cache.New()
	require.NoError(t, out.Restore(c))
	return out
}

// restart returns the cache of an agent that starts with the checkpoint of c.
func restart(t require.TestingT, c *cache.Cache) *cache.Writer {
	contents, _, err := decode(encoded(t, everything(t, c)), "node-1")
	require.NoError(t, err)
	return &cache.Writer{Cache: restored(t, contents)}
}

func requireSame(t require.TestingT, want, got *cache.Contents) {
	a, b := *want, *got
	sortObjects(&a)
	sortObjects(&b)
	a.Revisions, b.Revisions = nil, nil
	require.Empty(t, modeltest.Diff(a, b))
}

func TestCheckpointHoldsEverything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		objects := make(map[model.Key]model.Object)
		for range rapid.IntRange(0, 30).Draw(t, "objects") {
			var o model.Object = modeltest.Service(t, modeltest.ServiceKey(t))
			if rapid.Bool().Draw(t, "slice") {
				o = modeltest.Slice(t, modeltest.SliceKey(t))
			}
			objects[o.Key()] = o
		}
		var list []model.Object
		for _, o := range objects {
			list = append(list, o)
		}
		var node *model.Node
		if rapid.Bool().Draw(t, "node") {
			node = modeltest.Node(t, "node-1")
		}
		shards := uint32(1) << rapid.IntRange(0, 4).Draw(t, "shards")
		c := inSyncWith(t, rapid.Uint64Min(1).Draw(t, "epoch"), shards, node, list...)
		for i := range rapid.IntRange(0, 3).Draw(t, "servers") {
			c.SetServers(append(c.Servers(), cache.Server{Address: fmt.Sprint("10.0.0.", i, ":8472"), Name: "s"}))
		}
		contents, written, err := decode(encoded(t, everything(t, c.Cache)), "node-1")
		require.NoError(t, err)
		require.EqualValues(t, 1234, written.UnixMilli())
		requireSame(t, everything(t, c.Cache), contents)
		requireSame(t, contents, everything(t, restored(t, contents)))
	})
}

// TestCheckpointWithAGap checks that a shard which waits for an object is resumed by its digest.
func TestCheckpointWithAGap(t *testing.T) {
	c := small(t)
	shard := modeltest.Web().ServiceKey().Shard(2)
	slice := modeltest.WebSlice(3)
	out, err := c.Apply(&model.Update{Shard: shard, From: c.Sequence(shard), To: c.Sequence(shard), Deltas: []*model.SliceDelta{
		{Namespace: slice.Namespace, Name: slice.Name, Version: model.Version{2}},
	}})
	require.NoError(t, err)
	require.Len(t, out.Missing, 1)
	again := restart(t, c.Cache)
	h := again.Begin()
	require.Zero(t, h.Sequences[shard])
	require.NotZero(t, h.Sequences[1-shard])
	_, digests := again.Digests()
	require.NotZero(t, digests[shard])
	require.Equal(t, model.StateDigest(digests), h.Digest)
}

func TestNoCheckpointIsReadInPart(t *testing.T) {
	file := encoded(t, everything(t, small(t).Cache))
	for n := range file {
		_, _, err := decode(file[:n], "node-1")
		require.Error(t, err, "torn after %d of %d bytes", n, len(file))
	}
	for i := range 8 * len(file) {
		flipped := bytes.Clone(file)
		flipped[i/8] ^= 1 << (i % 8)
		_, _, err := decode(flipped, "node-1")
		require.Error(t, err, "bit %d flipped", i)
	}
	_, _, err := decode(append(bytes.Clone(file), 0), "node-1")
	require.ErrorContains(t, err, "checksum")
}

// seal returns a file whose sections have these contents. Its format and checksum are correct.
func seal(contents ...[]byte) []byte {
	e := newEncoder()
	var sections [][]byte
	for _, c := range contents {
		sections = append(sections, e.section(c))
	}
	var b bytes.Buffer
	_, _ = writeFile(&b, time.Now(), sections) // a buffer in memory does not fail
	return b.Bytes()
}

func marshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	require.NoError(t, err)
	return b
}

func frame(t testing.TB, u *model.Update) []byte {
	t.Helper()
	f, err := wire.EncodeUpdate(u)
	require.NoError(t, err)
	return f
}

// TestWhatIsInACheckpointIsChecked checks that contents which make no sense are rejected even if
// the checksum is correct.
func TestWhatIsInACheckpointIsChecked(t *testing.T) {
	service := modeltest.Web()
	good := func() *pb.Hello {
		return &pb.Hello{NodeName: "node-1", Epoch: 1, Sequences: []uint64{1}}
	}
	node, err := wire.EncodeNode("node-1", nil, 0)
	require.NoError(t, err)
	whole := frame(t, &model.Update{Full: true, Services: []*model.Service{service}})
	file := func(change func(*pb.Hello), rest ...[]byte) []byte {
		h := good()
		change(h)
		return seal(append([][]byte{marshal(t, h), nil, nil}, rest...)...)
	}
	same := func(*pb.Hello) {}
	accept := func(file []byte) error {
		contents, _, err := decode(file, "node-1")
		if err != nil {
			return err
		}
		return cache.New().Restore(contents)
	}
	require.NoError(t, accept(file(same, node, whole)))
	reseal := func(b []byte, change func([]byte)) []byte {
		body := b[:len(b)-checksumSize]
		change(body)
		return binary.BigEndian.AppendUint64(bytes.Clone(body), xxhash.Sum64(body))
	}
	manyServers := &pb.Servers{}
	for range maxServers + 1 {
		manyServers.Servers = append(manyServers.Servers, &pb.Server{})
	}
	broken, err := wire.Encode(&pb.StreamResponse{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: &pb.ShardUpdate{
		Full: true, Services: []*pb.Service{{Name: "no version"}},
	}}})
	require.NoError(t, err)
	for name, c := range map[string]struct {
		file []byte
		says string
	}{
		"something else":   {[]byte(strings.Repeat("a file of another program ", 3)), "not a checkpoint file"},
		"another format":   {reseal(file(same, node, whole), func(b []byte) { b[len(fileMagic)+3] = 99 }), "format 99"},
		"another node":     {file(func(h *pb.Hello) { h.NodeName = "node-2" }, node, whole), `for node "node-2", but this node is "node-1"`},
		"no epoch":         {file(func(h *pb.Hello) { h.Epoch = 0 }, node, whole), "epoch 0"},
		"no shards":        {file(func(h *pb.Hello) { h.Sequences = nil }, node), "0 sequences"},
		"three shards":     {file(func(h *pb.Hello) { h.Sequences = make([]uint64, 3) }, node), "3 sequences"},
		"no sections":      {seal(), "hello"},
		"a shard less":     {file(same, node), "4 sections"},
		"a shard more":     {file(same, node, whole, whole), "6 sections"},
		"bytes at the end": {reseal(append(file(same, node, whole), make([]byte, 8)...), func(b []byte) {}), "follow the last section"},
		"many servers":     {seal(marshal(t, good()), marshal(t, manyServers), nil, node, whole), "1025 servers"},
		"servers without names": {seal(marshal(t, good()), marshal(t, &pb.Servers{Servers: []*pb.Server{{Address: "10.0.0.1:1"}}}), nil, node, whole),
			"1 servers and 0 names"},
		"no node":         {file(same, whole, whole), "no Node"},
		"no shard":        {file(same, node, node), "not part of a whole shard"},
		"another shard":   {file(same, node, frame(t, &model.Update{Shard: 1, Full: true})), "not part of a whole shard"},
		"part of a shard": {file(same, node, frame(t, &model.Update{Services: []*model.Service{service}})), "not part of a whole shard"},
		"one object twice": {file(same, node, frame(t, &model.Update{Full: true, Services: []*model.Service{service, service}})),
			"1 objects are named more than once"},
		"an object that is not whole": {file(same, node, broken), "no version"},
		"no frame":                    {file(same, node, []byte("\xff\xff")), "decode"},
		"an object in a wrong shard": {file(func(h *pb.Hello) { h.Sequences = make([]uint64, 2) }, node,
			frame(t, &model.Update{Shard: 0, Full: true, Services: []*model.Service{service}}),
			frame(t, &model.Update{Shard: 1, Full: true, Services: []*model.Service{service}})), "belongs to shard"},
		"a section that says it is huge": {reseal(file(same, node, whole), func(b []byte) {
			binary.BigEndian.PutUint32(b[fileHeader:], 1<<31)
		}), "claims"},
		"a section that is larger than it says":  {reseal(file(same, node, whole), func(b []byte) { b[fileHeader+3]-- }), "hello"},
		"a section that is smaller than it says": {reseal(file(same, node, whole), func(b []byte) { b[fileHeader+3]++ }), "hello"},
		"a section without an end": {reseal(file(same, node, whole), func(b []byte) {
			binary.BigEndian.PutUint32(b[fileHeader+4:], 1<<31)
		}), "unexpected EOF"},
	} {
		require.ErrorContains(t, accept(c.file), c.says, name)
	}
}

// kept is a Checkpoint in its own directory.
type kept struct {
	*Checkpoint
	cache    *cache.Cache
	logs     *logtest.Buffer
	registry *prometheus.Registry
}

// open opens a checkpoint of node-1.
func open(t testing.TB, path string, c *cache.Cache) *kept {
	t.Helper()
	k := &kept{cache: c, logs: &logtest.Buffer{}, registry: prometheus.NewRegistry()}
	k.Checkpoint = Open(Options{
		Path: path, NodeName: "node-1", Cache: c, Logger: slog.New(slog.NewTextHandler(k.logs, nil)), Registerer: k.registry,
	})
	return k
}

// metric returns the value of a gauge or counter.
func (k *kept) metric(t testing.TB, name string) float64 {
	t.Helper()
	families, err := k.registry.Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetGauge().GetValue() + f.GetMetric()[0].GetCounter().GetValue()
		}
	}
	require.Fail(t, "no such metric", name)
	return 0
}

func TestABadCheckpointIsSetAside(t *testing.T) {
	path := filepath.Join(t.TempDir(), "checkpoint")
	good := encoded(t, everything(t, small(t).Cache))
	require.NoError(t, os.WriteFile(path+rejectedSuffix, []byte("older"), 0o600))
	require.NoError(t, os.WriteFile(path, good[:len(good)-1], 0o600))
	k := open(t, path, cache.New())
	require.NoFileExists(t, path)
	aside, err := os.ReadFile(path + rejectedSuffix)
	require.NoError(t, err)
	require.Equal(t, good[:len(good)-1], aside)
	require.Equal(t, 1, strings.Count(k.logs.String(), "\n"), k.logs)
	for _, says := range []string{"level=WARN", "set it aside", path, "checksum mismatch"} {
		require.Contains(t, k.logs.String(), says)
	}
	require.Empty(t, k.cache.Services())
	require.Zero(t, k.cache.Epoch())
	require.False(t, k.restored)
}

func TestRemove(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "checkpoint")
	require.NoError(t, Remove(path))
	for _, suffix := range []string{"", rejectedSuffix, newSuffix} {
		require.NoError(t, os.WriteFile(path+suffix, nil, 0o600))
	}
	require.NoError(t, Remove(path))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries)
	require.ErrorContains(t, Remove(dir), "not a regular file")
	require.DirExists(t, dir)
}

// TestACheckpointMustBeAFile proves that something else at its path is neither read nor replaced,
// and that the checkpoint is written once it is gone.
func TestACheckpointMustBeAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "checkpoint")
	require.NoError(t, syscall.Mkfifo(path, 0o600)) // nobody would ever end to read it
	k := open(t, path, cache.New())
	require.Equal(t, 1, k.logs.Count("level=ERROR", "Cannot use the checkpoint", "not a regular file"))
	fillSmall(t, k.cache)
	k.save()
	info, err := os.Lstat(path)
	require.NoError(t, err)
	require.Equal(t, os.ModeNamedPipe, info.Mode().Type())
	require.EqualValues(t, 1, k.metric(t, "slicecast_agent_checkpoint_errors_total"))
	require.NoError(t, os.Remove(path))
	k.save()
	require.True(t, open(t, path, cache.New()).restored)
}

func TestSave(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "checkpoint")
	// A killed process left this file behind.
	require.NoError(t, os.WriteFile(path+newSuffix, bytes.Repeat([]byte("torn"), 1000), 0o600))
	k := open(t, path, cache.New())
	k.save()
	require.NoFileExists(t, path, "a cache that was never in sync is a part")

	fillSmall(t, k.cache)
	k.save()
	first, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), first.Mode())
	require.EqualValues(t, first.Size(), k.metric(t, "slicecast_agent_checkpoint_bytes"))
	require.InDelta(t, time.Now().Unix(), k.metric(t, "slicecast_agent_checkpoint_timestamp_seconds"), 60)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1)

	k.save()
	again, err := os.Stat(path)
	require.NoError(t, err)
	require.True(t, os.SameFile(first, again), "nothing has changed")

	(&cache.Writer{Cache: k.cache}).SetServers([]cache.Server{{Address: "10.0.0.1:8472"}})
	k.save()
	again, err = os.Stat(path)
	require.NoError(t, err)
	require.False(t, os.SameFile(first, again))

	opened := open(t, path, cache.New())
	require.Len(t, opened.cache.Servers(), 1)
	requireSame(t, everything(t, k.cache), everything(t, opened.cache))
	require.InDelta(t, 0, time.Since(opened.written), float64(time.Minute))
}

func TestOnlyWhatHasChangedIsCompressedAgain(t *testing.T) {
	var objects []model.Object
	for i := range 20 {
		name := fmt.Sprint("service-", i)
		objects = append(objects, named(fmt.Sprint("slice-", i), name, 10))
	}
	c := inSyncWith(t, 7, 8, nil, objects...)
	k := open(t, filepath.Join(t.TempDir(), "checkpoint"), c.Cache)
	k.save()
	before := append([]encodedShard(nil), k.encoder.shards...)
	require.Len(t, before, 8)

	changed := named("slice-3", "service-3", 11)
	shard := changed.ServiceKey().Shard(8)
	_, err := c.Apply(&model.Update{Shard: shard, From: uint64(shard) + 100, To: uint64(shard) + 101, Slices: []*model.Slice{changed}})
	require.NoError(t, err)
	k.save()
	for i, s := range k.encoder.shards {
		require.Equal(t, uint32(i) != shard, &before[i].sections[0][0] == &s.sections[0][0], i)
	}
	// Another server has the same state at other positions, so nothing differs.
	require.NoError(t, c.Welcome(8, 8))
	before = append([]encodedShard(nil), k.encoder.shards...)
	k.save()
	for i, s := range k.encoder.shards {
		require.Same(t, &before[i].sections[0][0], &s.sections[0][0])
	}
	requireSame(t, everything(t, c.Cache), everything(t, open(t, k.options.Path, cache.New()).cache))
}

func TestAFailingDiskIsReportedOnce(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "later")
	k := open(t, filepath.Join(dir, "checkpoint"), cache.New())
	require.Contains(t, k.logs.String(), "Cannot keep a checkpoint, its directory does not exist")
	fillSmall(t, k.cache)
	for range 3 {
		k.save()
	}
	require.EqualValues(t, 3, k.metric(t, "slicecast_agent_checkpoint_errors_total"))
	require.Equal(t, 1, strings.Count(k.logs.String(), "Cannot write the checkpoint"), k.logs)
	require.NoError(t, os.Mkdir(dir, 0o700))
	k.save()
	require.Contains(t, k.logs.String(), "written again")
	require.FileExists(t, k.options.Path)
}

// TestReplaceFile checks that a failed write leaves the old file in place.
func TestReplaceFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, []byte("old"), 0o600))
	_, err := replaceFile(system{}, path, func(w io.Writer) (int, error) {
		_, err := io.WriteString(w, "half of")
		require.NoError(t, err)
		return 0, io.ErrShortWrite
	})
	require.ErrorIs(t, err, io.ErrShortWrite)
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "old", string(b))
	require.NoFileExists(t, path+newSuffix)
}

// run starts Checkpoint.Run. stop ends it.
func (k *kept) run() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { k.Run(ctx) })
	return func() {
		cancel()
		running.Wait()
	}
}

// TestKernelAhead asserts that the kernel counts as ahead of a checkpoint if the agent that ran
// last was killed in the same boot, whatever the disk did. It does not after an end for which the
// last save holds everything.
func TestKernelAhead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "checkpoint")
	settled := make(chan struct{})
	close(settled)
	start := func(boot string) (*Checkpoint, *cache.Cache) {
		c := cache.New()
		return Open(Options{
			Path: path, NodeName: "node-1", Cache: c, Boot: boot, Settled: settled, Logger: slog.New(slog.DiscardHandler),
		}), c
	}
	stop := func(k *Checkpoint) {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		k.Run(ctx)
	}
	k, c := start("one")
	require.False(t, k.Ahead(), "there is no checkpoint")
	fillSmall(t, c)
	stop(k)
	k, _ = start("one")
	require.False(t, k.Ahead(), "the last save held everything")
	stop(k)
	k, _ = start("one")
	require.False(t, k.Ahead(), "the agent was never in sync")
	k, _ = start("one")
	require.True(t, k.Ahead(), "the agent was killed")
	stop(k)
	k, _ = start("one")
	require.True(t, k.Ahead(), "nothing was saved since")
	k, _ = start("two")
	require.False(t, k.Ahead(), "the machine has booted")
	k, c = start("two")
	require.True(t, k.Ahead(), "the agent was killed in this boot, too")
	inSync := cache.Writer{Cache: c}
	require.NoError(t, inSync.Welcome(7, 2))
	require.NoError(t, inSync.InSync([]uint64{3, 4}, model.ResourceVersions{}))
	require.NoError(t, os.Mkdir(path+newSuffix, 0o700))
	stop(k)
	require.NoError(t, os.Remove(path+newSuffix))
	k, _ = start("two")
	require.True(t, k.Ahead(), "the last save failed")
	synctest.Test(t, func(*testing.T) {
		k, c := start("two")
		k.options.Settled = make(chan struct{})
		fillSmall(t, c)
		stop(k)
		require.False(t, k.Saved().IsZero())
	})
	k, _ = start("two")
	require.True(t, k.Ahead(), "the kernel was still being programmed")
	k, _ = start("")
	require.False(t, k.Ahead(), "nobody knows")
	require.NoError(t, Remove(path))
	require.NoFileExists(t, path+aheadSuffix)
}

func TestStaleAfterGrace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "checkpoint")
	require.NoError(t, os.WriteFile(path, encoded(t, everything(t, small(t).Cache)), 0o600))
	synctest.Test(t, func(t *testing.T) {
		c := &cache.Writer{Cache: cache.New()}
		k := open(t, path, c.Cache)
		defer k.run()()
		<-time.After(staleGrace - time.Millisecond)
		synctest.Wait()
		_, ok := c.Take()
		require.False(t, ok, "it counts for nothing yet")
		require.Zero(t, k.metric(t, "slicecast_agent_stale"))

		<-c.Dirty()
		synctest.Wait()
		changes, ok := c.Take()
		require.True(t, ok)
		require.Equal(t, []model.ServiceKey{modeltest.Web().ServiceKey()}, changes.Services)
		require.True(t, changes.Node)
		require.Empty(t, changes.Positions, "nothing that no server has confirmed is acked")
		require.EqualValues(t, 1, k.metric(t, "slicecast_agent_stale"))
		require.Equal(t, 1, strings.Count(k.logs.String(), "No server has synced this node yet, using the checkpoint"), k.logs)
		require.Contains(t, k.logs.String(), "age=")

		// Another server holds the same state, so no Service is touched and all positions can be
		// acked.
		require.NoError(t, c.Welcome(9, 2))
		require.NoError(t, c.InSync([]uint64{3, 4}, model.ResourceVersions{}))
		<-c.Dirty()
		changes, ok = c.Take()
		require.True(t, ok)
		require.Empty(t, changes.Services)
		require.Equal(t, map[uint32]uint64{0: 3, 1: 4}, changes.Positions)
		require.Zero(t, k.metric(t, "slicecast_agent_stale"))
	})
}

func TestNotStaleIfAServerIsFasterThanTheGrace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "checkpoint")
	require.NoError(t, os.WriteFile(path, encoded(t, everything(t, small(t).Cache)), 0o600))
	synctest.Test(t, func(t *testing.T) {
		c := &cache.Writer{Cache: cache.New()}
		k := open(t, path, c.Cache)
		defer k.run()()
		require.NoError(t, c.Welcome(7, 2))
		require.NoError(t, c.InSync([]uint64{100, 101}, model.ResourceVersions{}))
		changes, ok := c.Take()
		require.True(t, ok)
		require.Len(t, changes.Services, 1, "all that was restored is new to the reader")
		<-time.After(2 * staleGrace)
		synctest.Wait()
		require.Zero(t, k.metric(t, "slicecast_agent_stale"))
		require.NotContains(t, k.logs.String(), "No server")
	})
}

func TestSavesAtIntervalsAndAtTheEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "checkpoint")
	synctest.Test(t, func(t *testing.T) {
		c := small(t)
		k := open(t, path, c.Cache)
		stop := k.run()
		<-time.After(interval - time.Millisecond)
		synctest.Wait()
		require.NoFileExists(t, path)
		<-time.After(time.Millisecond)
		synctest.Wait()
		first, err := os.Stat(path)
		require.NoError(t, err)

		c.SetNode(&model.Node{Name: "node-1", Labels: map[string]string{"new": ""}})
		stop()
		last, err := os.Stat(path)
		require.NoError(t, err)
		require.False(t, os.SameFile(first, last))
	})
	contents, _, err := readFile(system{}, path, "node-1")
	require.NoError(t, err)
	require.Contains(t, contents.Node.Labels, "new")
}

// TestAHangingDiskHoldsUpNothing checks that Run returns in time although a write hangs.
func TestAHangingDiskHoldsUpNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "checkpoint")
	// Opening the FIFO for writing blocks until there is a reader.
	require.NoError(t, unix.Mkfifo(path+newSuffix, 0o600))
	k := open(t, path, small(t).Cache)
	start := time.Now()
	k.run()()
	require.Less(t, time.Since(start), patience)
	require.Contains(t, k.logs.String(), "Cannot write the last checkpoint in time")
	reader, err := os.OpenFile(path+newSuffix, os.O_RDONLY, 0)
	require.NoError(t, err)
	_, err = io.Copy(io.Discard, reader)
	require.NoError(t, errors.Join(err, reader.Close()))
}

// TestCheckpointOfNewerSoftware checks that a shard has no position if its objects have fields that
// this software does not know, so that the server sends what the cache lacks.
func TestCheckpointOfNewerSoftware(t *testing.T) {
	for _, unknown := range [][]byte{nil, protowire.AppendVarint(protowire.AppendTag(nil, 1000, protowire.VarintType), 1)} {
		p := wire.UpdateToProto(&model.Update{Full: true, Services: []*model.Service{modeltest.Web()}})
		want := uint64(7)
		if unknown != nil {
			p.GetServices()[0].ProtoReflect().SetUnknown(unknown)
			p.Services[0].Version[0]++
			want = 0
		}
		whole, err := wire.Encode(&pb.StreamResponse{Message: &pb.StreamResponse_ShardUpdate{ShardUpdate: p}})
		require.NoError(t, err)
		node, err := wire.EncodeNode("node-1", nil, 0)
		require.NoError(t, err)
		hello := &pb.Hello{NodeName: "node-1", Epoch: 1, Sequences: []uint64{7}}
		contents, _, err := decode(seal(marshal(t, hello), nil, nil, node, whole), "node-1")
		require.NoError(t, err)
		require.Equal(t, []uint64{want}, restored(t, contents).Status().Sequences)
	}
}

// largeSlices returns slices of one shard that need several frames.
func largeSlices(n int) (objects []model.Object) {
	for i := range n {
		s := *named(fmt.Sprint("slice-", i), "web", 1000)
		for j := range s.Endpoints {
			s.Endpoints[j].NodeHints = []string{strings.Repeat("n", wire.MaxPart/6000), strings.Repeat("o", wire.MaxPart/6000)}
		}
		objects = append(objects, model.NewSlice(s))
	}
	return objects
}

// TestCheckpointOfALargeShard checks that a checkpoint holds a shard that needs several frames.
func TestCheckpointOfALargeShard(t *testing.T) {
	objects := largeSlices(2 * wire.MaxFrame / wire.MaxPart * 3)
	c := inSyncWith(t, 7, 1, nil, objects...)
	k := open(t, filepath.Join(t.TempDir(), "checkpoint"), c.Cache)
	k.save()
	require.Greater(t, len(k.encoder.shards[0].sections), 2*wire.MaxFrame/wire.MaxPart)
	again := open(t, k.options.Path, cache.New())
	require.True(t, again.restored, again.logs)
	require.Equal(t, k.cache.Status().Digests, again.cache.Status().Digests)
	require.Equal(t, len(objects), again.cache.Status().Slices)
}
