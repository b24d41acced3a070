// This test proves that nothing is lost while everything breaks at random.
package client

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/model/modeltest"
	"github.com/slicecast/slicecast/internal/proxytest"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
)

var seed = flag.Uint64("seed", 0, "seed of TestChaos; 0: a new one")

const (
	stableServices   = 6
	volatileServices = 8
)

// cluster is the true state, which all servers share. Some Services always exist and always have a
// slice with an endpoint. Other Services and their slices are added, removed and moved.
type cluster struct {
	random  *rand.Rand
	objects map[model.Key]model.Keyed
	store   *store.Store // store of the running server
}

func (c *cluster) upsert(o model.Keyed) {
	c.objects[o.Key()] = o
	c.store.Upsert(o, 0)
}

func stableKey(i int) model.ServiceKey {
	return model.ServiceKey{Namespace: "default", Name: fmt.Sprint("stable-", i)}
}

func (c *cluster) slice(name, service string, endpoints int) *model.Slice {
	s := modeltest.WebSlice(endpoints)
	s.Name, s.Service = name, service
	for i := range s.Endpoints {
		s.Endpoints[i].Conditions.Ready = c.random.IntN(4) != 0
	}
	return model.NewSlice(s)
}

func (c *cluster) service(name string) *model.Service {
	return model.NewService(model.Service{
		Namespace: "default", Name: name, Type: model.ClusterIP, CreationTimeSeconds: int64(c.random.IntN(5)),
	})
}

// write makes one change.
func (c *cluster) write() {
	stable := stableKey(c.random.IntN(stableServices)).Name
	volatileService := fmt.Sprint("volatile-", c.random.IntN(volatileServices))
	volatileSlice := fmt.Sprint("slice-", c.random.IntN(2*volatileServices))
	switch c.random.IntN(10) {
	case 0:
		c.upsert(c.service(stable))
	case 1, 2, 3, 4:
		c.upsert(c.slice(stable, stable, 1+c.random.IntN(60)))
	case 5:
		c.upsert(c.service(volatileService))
	case 6, 7:
		c.upsert(c.slice(volatileSlice, volatileService, c.random.IntN(10)))
	case 8:
		key := c.service(volatileService).Key()
		delete(c.objects, key)
		c.store.Remove(key, 0)
	case 9:
		key := c.slice(volatileSlice, "", 0).Key()
		delete(c.objects, key)
		c.store.Remove(key, 0)
	}
}

// published reports whether the server has published the present state.
func (c *cluster) published() bool {
	want := model.ShardDigests(c.store.Shards(), func(yield func(model.Object, model.Version) bool) {
		for _, o := range c.objects {
			if !yield(o.(model.Object), o.(model.Object).ContentVersion()) {
				return
			}
		}
	})
	digest, _ := c.store.Digest()
	return digest == model.StateDigest(want)
}

// newStore sets the store to that of a server that starts now. It has a new epoch and a random
// number of shards.
func (c *cluster) newStore(t *testing.T) {
	t.Helper()
	s, err := store.New(store.Options{Shards: 1 << c.random.IntN(4), Tombstones: 8})
	require.NoError(t, err)
	c.store = s
	byKind := map[model.Kind][]model.Keyed{}
	for key, o := range c.objects {
		byKind[key.Kind] = append(byKind[key.Kind], o)
	}
	for kind, list := range byKind {
		s.Replace(kind, list, 0)
	}
	s.Synced()
}

// TestChaos checks the client while the cluster changes and streams and servers break. After each
// quiet period, every client must hold what the server holds. At no time may a client lack an
// object that always exists.
func TestChaos(t *testing.T) {
	seed := *seed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("to repeat: -run TestChaos -args -seed=%d", seed)
	id := newIdentity(t)
	c := &cluster{random: rand.New(rand.NewPCG(seed, 0)), objects: map[model.Key]model.Keyed{}}
	c.newStore(t)
	for i := range stableServices {
		name := stableKey(i).Name
		c.upsert(c.service(name))
		c.upsert(c.slice(name, name, 10))
	}
	server := serveStore(t, id, c.store, noHeartbeat)

	const clients, rounds = 3, 12
	var missing sync.Map // objects that a client lacked at some time
	var caches []*Cache
	var proxies []*proxytest.Proxy
	var agents []*agent
	for i := range clients {
		cache, p := NewCache(), proxytest.New(t, server.address)
		check := func(r *wire.Response) {
			if !cache.Status().InSync {
				return
			}
			for s := range stableServices {
				service, slices := cache.Service(stableKey(s))
				if service == nil || len(slices) == 0 || len(slices[0].Endpoints) == 0 {
					missing.Store(fmt.Sprintf("client %d, %v: Service %v, slices %v", i, stableKey(s), service, slices), r)
				}
			}
		}
		caches, proxies = append(caches, cache), append(proxies, p)
		agents = append(agents, connect(t, id, cache, check, p.Address()))
	}

	for round := range rounds {
		for range 20 + c.random.IntN(40) {
			c.write()
			p := proxies[c.random.IntN(clients)]
			switch c.random.IntN(12) {
			case 0:
				p.Cut()
			case 1, 2:
				p.CutAfter(c.random.IntN(6000)) // often in the middle of a message
			case 3: // gives the others time to keep up
				<-time.After(time.Duration(c.random.IntN(3000)) * time.Microsecond)
			}
		}
		if round%3 == 2 {
			server.stop()
			for range 10 {
				c.write() // no server is running
			}
			c.newStore(t)
			server = serveStore(t, id, c.store, noHeartbeat)
			for _, p := range proxies {
				p.Lead(server.address)
			}
		}
		require.Eventually(t, c.published, patience, tick)
		for i, cache := range caches {
			require.Eventually(t, func() bool { return holds(cache, c.store) }, patience, tick, "round %d, client %d", round, i)
		}
	}
	missing.Range(func(what, response any) bool {
		t.Errorf("%v, after %+v", what, response)
		return true
	})
	for i, a := range agents {
		_, _, _, inSyncs := a.counts()
		t.Logf("client %d was in sync %d times", i, inSyncs)
	}
}
