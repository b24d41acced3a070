package cluster

import (
	"io"
	"net"
	"path/filepath"
	"sync"

	"k8s.io/client-go/rest"
)

// serveOutside forwards connections from outside of the namespaces to the API server, and writes a
// kubeconfig for them. It does nothing if there is no listener outside.
func (c *Cluster) serveOutside() (err error) {
	if c.outside, err = outsideListener(); err != nil || c.outside == nil {
		return err
	}
	config := rest.CopyConfig(c.ControlPlane.AdminConfig())
	config.Host = "https://" + c.outside.Addr().String()
	c.OutsideKubeconfig = filepath.Join(c.Dir, "kubeconfig")
	if err := c.ControlPlane.WriteKubeconfig(c.OutsideKubeconfig, config); err != nil {
		return err
	}
	c.serving.Go(func() {
		for {
			near, err := c.outside.Accept()
			if err != nil {
				return // closed by Stop
			}
			c.serving.Go(func() { c.forward(near) })
		}
	})
	return nil
}

// forward connects a connection with the API server until one of both ends it.
func (c *Cluster) forward(near net.Conn) {
	defer near.Close()
	far, err := net.Dial("tcp", c.ControlPlane.URL()[len("https://"):])
	if err != nil {
		return
	}
	defer far.Close()
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{near, far}, {far, near}} {
		both.Go(func() {
			_, _ = io.Copy(way[1], way[0]) // the ends of the connection handle errors
			near.Close()
			far.Close()
		})
	}
	both.Wait()
}
