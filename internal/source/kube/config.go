package kube

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// These limit the requests to the API server, per second and at once. A source makes a handful of
// requests at its start and after failures. The limit bounds the damage of a loop.
const (
	queriesPerSecond = 20
	queriesBurst     = 40
)

// ErrNotInPod is the error of a process that has no kubeconfig and runs in no Pod.
var ErrNotInPod = errors.New("no kubeconfig, and not running in a pod: set --kubeconfig")

// Config returns the configuration for clients of the API server. It uses the current context of
// the kubeconfig file. If the path is empty, it uses the ServiceAccount of the pod that this
// process runs in. Clients prefer protobuf.
func Config(kubeconfig string) (*rest.Config, error) {
	config, err := load(kubeconfig)
	if err != nil {
		return nil, err
	}
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.QPS, config.Burst = queriesPerSecond, queriesBurst
	config.UserAgent = "slicecast/" + filepath.Base(os.Args[0])
	return config, nil
}

func load(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		config, err := rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			return nil, ErrNotInPod
		}
		if err != nil {
			return nil, fmt.Errorf("in-cluster configuration: %w; does the pod mount its ServiceAccount's token?", err)
		}
		return config, nil
	}
	file, err := clientcmd.LoadFromFile(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w; give the path of a readable kubeconfig file", kubeconfig, err)
	}
	if file.CurrentContext == "" {
		return nil, fmt.Errorf("kubeconfig %s has no current-context: set one with "+
			"kubectl config use-context --kubeconfig %s NAME", kubeconfig, kubeconfig)
	}
	if _, ok := file.Contexts[file.CurrentContext]; !ok {
		return nil, fmt.Errorf("kubeconfig %s: the current-context %q is not among its contexts: add it or name another",
			kubeconfig, file.CurrentContext)
	}
	// The file is loaded by its path, as relative paths in it are relative to its directory.
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		&clientcmd.ClientConfigLoadingRules{ExplicitPath: kubeconfig}, nil).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s, context %q: %w; correct its cluster and user", kubeconfig, file.CurrentContext, err)
	}
	return config, nil
}
