package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// setProxyName is what to do if the servers do not say which Services they serve.
const setProxyName = "set --service-proxy-name to their value, or to an empty one if they have none"

// ServiceProxyName returns the value of the label service.kubernetes.io/service-proxy-name of the
// Services that the servers serve, according to their command lines and configuration files. If it
// is empty, they serve the Services without the label. known is false if there are only relays,
// which serve what the servers above them do.
func (f *Fleet) ServiceProxyName(ctx context.Context, servers []*Server) (name string, known bool, err error) {
	var first *Server
	files := make(map[string]*corev1.ConfigMap) // by namespace and name
	for _, s := range servers {
		if s.Relay || errors.Is(s.missing, errTerminating) || s.proxyName == nil && s.config == "" {
			continue
		}
		its := ""
		if s.proxyName != nil {
			its = *s.proxyName
		} else if its, err = f.configuredProxyName(ctx, s, files); err != nil {
			return "", false, fmt.Errorf("the configuration of %v: %w; %s", s, err, setProxyName)
		}
		if first != nil && its != name {
			return "", false, fmt.Errorf("%v has --service-proxy-name=%s, and %v has --service-proxy-name=%s: give all servers the same, or %s",
				first, name, s, its, setProxyName)
		}
		first, name = cmp.Or(first, s), its
	}
	return name, first != nil, nil
}

// configuredProxyName returns the serviceProxyName in the configuration file of a server. The file
// must be in a ConfigMap.
func (f *Fleet) configuredProxyName(ctx context.Context, s *Server, files map[string]*corev1.ConfigMap) (string, error) {
	source, key := configMapOf(s)
	if source == "" {
		return "", fmt.Errorf("--config=%s is in no ConfigMap", s.config)
	}
	id := s.Namespace + "/" + source
	if files[id] == nil {
		held, err := Within(ctx, f, func(ctx context.Context) (*corev1.ConfigMap, error) {
			return f.client.CoreV1().ConfigMaps(s.Namespace).Get(ctx, source, metav1.GetOptions{})
		})
		if err != nil {
			return "", withRights(err)
		}
		files[id] = held
	}
	content, ok := files[id].Data[key]
	if !ok {
		return "", fmt.Errorf("the ConfigMap %s has no key %s", id, key)
	}
	var fields struct {
		ServiceProxyName string `json:"serviceProxyName"`
	}
	if err := yaml.Unmarshal([]byte(content), &fields); err != nil { // fields of other versions do not matter
		return "", fmt.Errorf("the key %s of the ConfigMap %s: %w", key, id, err)
	}
	return fields.ServiceProxyName, nil
}

// configMapOf returns the name of the ConfigMap that a server's configuration file is in, and its
// key. The name is empty if the file is in none.
func configMapOf(s *Server) (name, key string) {
	var volume, file, longest string
	for _, c := range s.Pod.Spec.Containers {
		if c.Name != s.Container {
			continue
		}
		for _, m := range c.VolumeMounts {
			at := path.Clean(m.MountPath)
			below, ok := strings.CutPrefix(path.Clean(s.config), at)
			if !ok || below != "" && !strings.HasPrefix(below, "/") && at != "/" || len(at) < len(longest) {
				continue
			}
			volume, file, longest = m.Name, strings.Trim(path.Join(m.SubPath, below), "/"), at
		}
	}
	for _, v := range s.Pod.Spec.Volumes {
		if v.Name != volume {
			continue
		}
		if v.ConfigMap != nil {
			return v.ConfigMap.Name, keyOf(v.ConfigMap.Items, file)
		}
		if v.Projected == nil {
			continue
		}
		for _, p := range v.Projected.Sources {
			if p.ConfigMap != nil {
				if key := keyOf(p.ConfigMap.Items, file); key != "" {
					return p.ConfigMap.Name, key
				}
			}
		}
	}
	return "", ""
}

// keyOf returns the key of a ConfigMap that is in a file of its volume. Without items, each key is
// the name of its file. The key is empty if none of the items is in the file.
func keyOf(items []corev1.KeyToPath, file string) string {
	if len(items) == 0 {
		return file
	}
	for _, i := range items {
		if path.Clean(i.Path) == file {
			return i.Key
		}
	}
	return ""
}
