package controlplane

import (
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

// LentVariable is an environment variable. It names control planes that another process has started and lends to this one, as Lend
// gives it: for a virtual machine, where a kube-apiserver would take minutes to start. Start gives one of them, without its
// processes, which nobody else has meanwhile and who had it before may have left objects in.
const LentVariable = "SLICECAST_CONTROL_PLANES"

// Lend gives the value of LentVariable for a process that has this process's files and reaches the control planes at unix sockets.
func Lend(planes []*ControlPlane, socket func(port uint16) string) string {
	var parts []string
	for _, cp := range planes {
		parts = append(parts, socket(cp.endpoint.Port())+"="+cp.dir)
	}
	return strings.Join(parts, ",")
}

// Port is the API server's.
func (cp *ControlPlane) Port() uint16 { return cp.endpoint.Port() }

// borrowed is a control plane that was lent, with an address that leads there.
type borrowed struct {
	lent     string
	listener net.Listener
	serving  sync.WaitGroup

	mu    sync.Mutex
	conns map[net.Conn]struct{} // nil once it is given back
}

// taken are the control planes that this process was lent and uses.
var (
	takenMu sync.Mutex
	taken   = map[string]bool{}
)

// borrow makes cp one of those that were lent, at an address of this process's own.
func (cp *ControlPlane) borrow(lent string, options Options) error {
	if options.Controllers || len(options.APIServerFlags) > 0 {
		return errors.New("control planes that are lent have no controllers and no flags of their own")
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
		cp.borrowed = &borrowed{lent: one, listener: listener, conns: map[net.Conn]struct{}{}}
		cp.borrowed.serving.Go(func() { cp.borrowed.serve(socket) })
		cp.client, err = kubernetes.NewForConfig(cp.AdminConfig())
		return err
	}
	return fmt.Errorf("all control planes that were lent are in use: %s", lent)
}

// serve connects whoever comes with the API server.
func (b *borrowed) serve(socket string) {
	for {
		near, err := b.listener.Accept()
		if err != nil {
			return
		}
		b.serving.Go(func() {
			far, err := net.Dial("unix", socket)
			if err != nil {
				_ = near.Close()
				return
			}
			var both sync.WaitGroup
			for _, way := range [][2]net.Conn{{near, far}, {far, near}} {
				if !b.hold(way[0]) {
					_ = way[0].Close()
				}
				both.Go(func() {
					_, _ = io.Copy(way[1], way[0]) // how it ends is the ends' business
					_ = way[1].Close()
				})
			}
			both.Wait()
			b.mu.Lock()
			defer b.mu.Unlock()
			delete(b.conns, near)
			delete(b.conns, far)
		})
	}
}

// hold has a connection closed when the control plane is given back; false: it was.
func (b *borrowed) hold(c net.Conn) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.conns == nil {
		return false
	}
	b.conns[c] = struct{}{}
	return true
}

func (b *borrowed) giveBack() error {
	err := b.listener.Close()
	b.mu.Lock()
	for c := range b.conns {
		_ = c.Close()
	}
	b.conns = nil
	b.mu.Unlock()
	b.serving.Wait()
	takenMu.Lock()
	defer takenMu.Unlock()
	delete(taken, b.lent)
	return err
}
