package app

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/source/kube"
)

// serverPortName is the name of the server's port in its EndpointSlices. If a slice has only one
// port, its name does not matter.
const serverPortName = "grpc"

// lookupTimeout bounds one lookup through the API server.
const lookupTimeout = 10 * time.Second

// discovery returns a function that finds the servers to begin with: those of --servers or of
// --server-service. With --ca-config-map, it also returns a function that returns the CAs that were
// found there.
func (o *Options) discovery(log *slog.Logger) (
	find func(context.Context) ([]client.Server, error), cas func() []byte, err error,
) {
	if o.ServerService == "" {
		return client.Resolve(o.Servers, log), nil, nil
	}
	service, _ := model.ParseServiceKey(o.ServerService) // validate has checked it
	connect := func() (lister, error) {
		config, err := kube.Config(o.Kubeconfig)
		if err != nil {
			return nil, err
		}
		return kube.Slices(config, service)
	}
	if _, err := connect(); errors.Is(err, kube.ErrNotInPod) {
		return nil, nil, err // no retry can change it
	}
	f := &finder{connect: connect, service: service, log: log}
	if o.CAConfigMap == "" {
		return f.servers, nil, nil
	}
	f.caFile, f.readCAs = o.Credentials.CAFile, o.readCAs
	return f.servers, f.earlyCAs, nil
}

// readCAs reads --ca-config-map with one request.
func (o *Options) readCAs(ctx context.Context) ([]byte, error) {
	config, err := kube.Config(o.Kubeconfig)
	if err != nil {
		return nil, err
	}
	api, _, err := kube.Core(config)
	if err != nil {
		return nil, err
	}
	name, _ := model.ParseServiceKey(o.CAConfigMap) // validate has checked it
	var m corev1.ConfigMap
	if err := api.Get().Namespace(name.Namespace).Resource("configmaps").Name(name.Name).Do(ctx).Into(&m); err != nil {
		return nil, err
	}
	if m.Data["ca.crt"] == "" {
		return nil, fmt.Errorf("ConfigMap %v has no ca.crt", name)
	}
	return []byte(m.Data["ca.crt"]), nil
}

// lister lists the EndpointSlices of the servers' Service.
type lister func(context.Context) ([]discoveryv1.EndpointSlice, error)

// finder finds servers by their own EndpointSlices, with one GET for each lookup. It does not use
// the virtual IP of their Service, because the agent itself has to program that IP first.
type finder struct {
	connect func() (lister, error) // reads the kubeconfig, or the files of the Pod's ServiceAccount
	list    lister                 // nil if the next lookup has to connect
	service model.ServiceKey
	log     *slog.Logger
	known   []client.Server

	caFile  string
	readCAs func(context.Context) ([]byte, error) // nil without --ca-config-map
	cas     atomic.Pointer[[]byte]                // what readCAs last returned; nil if it has not
}

// servers returns the servers that are ready. If the lookup fails, it returns those of the last
// lookup that succeeded.
func (f *finder) servers(ctx context.Context) ([]client.Server, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	list, err := f.slices(ctx)
	if err != nil {
		err = fmt.Errorf("list the EndpointSlices of Service %v: %w", f.service, err)
		if len(f.known) == 0 {
			return nil, err
		}
		f.log.Warn("Cannot look up the servers, using those of the last lookup", "err", err)
		return f.known, nil
	}
	var found []client.Server
	for _, address := range addresses(list) {
		found = append(found, client.Server{Address: address})
	}
	if len(found) == 0 {
		return f.known, fmt.Errorf("no ready endpoint of Service %v has a port named %s: "+
			"check that slicecast-server runs", f.service, serverPortName)
	}
	f.known = found
	if _, err := os.Stat(f.caFile); f.readCAs != nil && errors.Is(err, fs.ErrNotExist) {
		if cas, err := f.readCAs(ctx); err != nil {
			f.log.Warn("Cannot look up the servers' CAs, and there is no file of them yet", "err", err)
		} else {
			f.cas.Store(&cas)
		}
	}
	return found, nil
}

// earlyCAs returns the CAs to use until there is a file of them, or nil.
func (f *finder) earlyCAs() []byte {
	if cas := f.cas.Load(); cas != nil {
		return *cas
	}
	return nil
}

// slices lists the EndpointSlices. After a failure, the next call connects again, because the files
// that the connection is made of may have been unusable.
func (f *finder) slices(ctx context.Context) (list []discoveryv1.EndpointSlice, err error) {
	if f.list == nil {
		if f.list, err = f.connect(); err != nil {
			return nil, err
		}
	}
	if list, err = f.list(ctx); err != nil {
		f.list = nil
	}
	return list, err
}

func addresses(list []discoveryv1.EndpointSlice) []string {
	var out []string
	for _, s := range list {
		if s.AddressType == discoveryv1.AddressTypeFQDN {
			continue
		}
		for _, p := range s.Ports {
			named := p.Name != nil && *p.Name == serverPortName
			if p.Port == nil || !named && len(s.Ports) > 1 {
				continue
			}
			for _, e := range s.Endpoints {
				if len(e.Addresses) > 0 && (e.Conditions.Ready == nil || *e.Conditions.Ready) {
					out = append(out, net.JoinHostPort(e.Addresses[0], strconv.Itoa(int(*p.Port))))
				}
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
