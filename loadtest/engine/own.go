package engine

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/slicecast/slicecast/internal/testenv/controlplane"
)

type own struct {
	control    *controlplane.ControlPlane
	dir        string
	kubeconfig string // path of the file, in dir
}

// ownAvailable returns nil if there are binaries to start an API server from. Otherwise its error
// says how to get them.
func ownAvailable() error { return controlplane.Available() }

func startOwn(ctx context.Context) (_ *own, err error) {
	o := &own{}
	if o.control, err = controlplane.Run(ctx, controlplane.Options{}); err != nil {
		return nil, err
	}
	if o.dir, err = os.MkdirTemp("", "slicecast-loadtest-"); err != nil {
		return nil, errors.Join(err, o.control.Close())
	}
	o.kubeconfig = filepath.Join(o.dir, "kubeconfig")
	if err := o.control.WriteKubeconfig(o.kubeconfig, o.control.AdminConfig()); err != nil {
		return nil, errors.Join(err, o.close())
	}
	return o, nil
}

// pid returns the process ID of the API server, without etcd.
func (o *own) pid() int { return o.control.APIServer.PID() }

func (o *own) close() error { return errors.Join(o.control.Close(), os.RemoveAll(o.dir)) }
