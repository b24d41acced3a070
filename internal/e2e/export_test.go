// This file exports the Services and slices of the API as manifests, for agents that read a
// directory.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/stretchr/testify/require"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// exporter writes all Services and slices of the API to a manifest in a folder, for nodes that do
// not use the API server.
type exporter struct {
	c       *cluster
	dir     string
	written []byte
}

func newExporter(c *cluster) *exporter {
	c.t.Helper()
	e := &exporter{c: c, dir: filepath.Join(c.dir, "manifests")}
	require.NoError(c.t, os.Mkdir(e.dir, 0o755))
	require.NoError(c.t, e.Write(c.t.Context()))
	return e
}

// Write replaces the manifest in one step if it has changed.
func (e *exporter) Write(ctx context.Context) error {
	services, endpointSlices, err := e.c.list(ctx)
	if err != nil {
		return err
	}
	var all bytes.Buffer
	encoder := json.NewEncoder(&all)
	for i := range services {
		services[i].TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}
		if err := encoder.Encode(services[i]); err != nil {
			return err
		}
	}
	for i := range endpointSlices {
		endpointSlices[i].TypeMeta = metav1.TypeMeta{APIVersion: discoveryv1.SchemeGroupVersion.String(), Kind: "EndpointSlice"}
		if err := encoder.Encode(endpointSlices[i]); err != nil {
			return err
		}
	}
	if bytes.Equal(all.Bytes(), e.written) {
		return nil
	}
	e.written = all.Bytes()
	partial := filepath.Join(e.c.dir, "partial")
	if err := os.WriteFile(partial, e.written, 0o600); err != nil {
		return err
	}
	return os.Rename(partial, filepath.Join(e.dir, "all.json"))
}
