package controlplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"

	"k8s.io/client-go/kubernetes"

	"github.com/slicecast/slicecast/internal/testca"
)

// LentVariable is the name of an environment variable. Its value, made by Lend, lists control
// planes that another process has started and lends to this one. It is for virtual machines, in
// which starting a kube-apiserver would take minutes. If it is set, Start returns one of these
// control planes, without its processes. No other caller uses that control plane at the same time,
// but an earlier one may have left objects in it.
const LentVariable = "SLICECAST_CONTROL_PLANES"

// Lend returns the value of LentVariable for a process that sees the files of this process and
// reaches each control plane at a unix socket. socket returns the path of the socket for the port
// of an API server.
func Lend(planes []*ControlPlane, socket func(port uint16) string) string {
	var parts []string
	for _, cp := range planes {
		parts = append(parts, socket(cp.endpoint.Port())+"="+cp.dir)
	}
	return strings.Join(parts, ",")
}

// Port returns the port of the API server.
func (cp *ControlPlane) Port() uint16 { return cp.endpoint.Port() }

// borrowed is a lent control plane in use. It forwards connections from a local address to the API
// server.
type borrowed struct {
	lent     string
	listener net.Listener
	serving  sync.WaitGroup
}

// taken holds the entries of LentVariable that this process uses. takenMu guards it.
var (
	takenMu sync.Mutex
	taken   = map[string]bool{}
)

// borrow makes cp one of the lent control planes that are not in use, at a local address.
func (cp *ControlPlane) borrow(lent string, options Options) error {
	if options.Controllers || options.Nodes || len(options.APIServerFlags) > 0 {
		return errors.New("lent control planes have no controllers and no flags of their own")
	}
	takenMu.Lock()
	defer takenMu.Unlock()
	for one := range strings.SplitSeq(lent, ",") {
		socket, dir, ok := strings.Cut(one, "=")
		if !ok || taken[one] {
			continue
		}
		ca, err := testca.Load(filepath.Join(dir, "ca.crt"), filepath.Join(dir, caKey))
		if err != nil {
			return err
		}
		address := options.Address
		if !address.IsValid() {
			address = loopback
		}
		listener, err := net.Listen("tcp", netip.AddrPortFrom(address, 0).String())
		if err != nil {
			return err
		}
		taken[one] = true
		cp.pki, cp.endpoint = &pki{dir, ca}, listener.Addr().(*net.TCPAddr).AddrPort()
		b := &borrowed{lent: one, listener: listener}
		ctx, cancel := context.WithCancel(context.Background())
		b.serving.Go(func() {
			defer cancel()
			b.serve(ctx, socket)
		})
		cp.borrowed = b
		cp.client, err = kubernetes.NewForConfig(cp.AdminConfig())
		return err
	}
	return fmt.Errorf("all lent control planes are in use: %s", lent)
}

// serve forwards each connection to the API server until the listener is closed. The end of ctx
// closes the connections.
func (b *borrowed) serve(ctx context.Context, socket string) {
	for {
		near, err := b.listener.Accept()
		if err != nil {
			return
		}
		b.serving.Go(func() {
			defer near.Close()
			far, err := net.Dial("unix", socket)
			if err != nil {
				return
			}
			closeBoth := func() { _, _ = near.Close(), far.Close() }
			defer context.AfterFunc(ctx, closeBoth)()
			var both sync.WaitGroup
			for _, way := range [][2]net.Conn{{near, far}, {far, near}} {
				both.Go(func() {
					_, _ = io.Copy(way[1], way[0]) // the ends of the connection handle errors
					closeBoth()
				})
			}
			both.Wait()
		})
	}
}

func (b *borrowed) giveBack() error {
	err := b.listener.Close()
	b.serving.Wait()
	takenMu.Lock()
	defer takenMu.Unlock()
	delete(taken, b.lent)
	return err
}
