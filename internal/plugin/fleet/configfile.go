package fleet

import (
	"context"
	"fmt"
	"path"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"
)

// ConfigMap returns a ConfigMap.
func (f *Fleet) ConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	return Within(ctx, f, func(ctx context.Context) (*corev1.ConfigMap, error) {
		return f.client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
	})
}

// ConfigFiles reads configuration files of Pods that are in ConfigMaps. It reads each ConfigMap
// once. Only one goroutine may use it.
type ConfigFiles struct {
	fleet *Fleet
	held  map[types.NamespacedName]*corev1.ConfigMap
}

// ConfigFiles returns a reader that has read nothing yet.
func (f *Fleet) ConfigFiles() *ConfigFiles {
	return &ConfigFiles{f, make(map[types.NamespacedName]*corev1.ConfigMap)}
}

// Decode decodes a container's configuration file, the value of --config, into a value that may
// have some of its fields. The error says what is missing if the file is in no ConfigMap, or if the
// ConfigMap cannot be read.
func (c *ConfigFiles) Decode(ctx context.Context, pod *corev1.Pod, container, file string, into any) error {
	source, key := configMapOf(pod, container, file)
	if source == "" {
		return fmt.Errorf("--config=%s is in no ConfigMap", file)
	}
	id := types.NamespacedName{Namespace: pod.Namespace, Name: source}
	if c.held[id] == nil {
		held, err := c.fleet.ConfigMap(ctx, id.Namespace, id.Name)
		if err != nil {
			return withRights(err)
		}
		c.held[id] = held
	}
	content, ok := c.held[id].Data[key]
	if !ok {
		return fmt.Errorf("the ConfigMap %v has no key %s", id, key)
	}
	if err := yaml.Unmarshal([]byte(content), into); err != nil {
		return fmt.Errorf("the key %s of the ConfigMap %v: %w", key, id, err)
	}
	return nil
}

// configMapOf returns the name of the ConfigMap that a file in a container comes from, and its key.
// The name is empty if the file comes from none.
func configMapOf(pod *corev1.Pod, container, name string) (source, key string) {
	var volume, file, longest string
	for _, c := range pod.Spec.Containers {
		if c.Name != container {
			continue
		}
		for _, m := range c.VolumeMounts {
			at := path.Clean(m.MountPath)
			below, ok := strings.CutPrefix(path.Clean(name), at)
			if !ok || below != "" && !strings.HasPrefix(below, "/") && at != "/" || len(at) < len(longest) {
				continue
			}
			volume, file, longest = m.Name, strings.Trim(path.Join(m.SubPath, below), "/"), at
		}
	}
	for _, v := range pod.Spec.Volumes {
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
