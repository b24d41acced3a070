package plugin

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
)

// clusterParts adds the objects of Kubernetes that matter to the fleet.
func (b *bugreport) clusterParts(ctx context.Context, f *fleet.Fleet, a *archive, found []*fleet.Server, pods []*fleet.Agent) {
	b.say("Reading the cluster's objects")
	add := func(file, title string, objects any, err error) {
		var text []byte
		if err == nil {
			text, err = a.redact.YAML(objects, "")
		}
		a.addWithoutSecrets(clusterGroup, "cluster/"+file, title, string(text), err)
	}
	nodes, err := fleet.List(ctx, f, f.Client().CoreV1().Nodes().List, metav1.ListOptions{})
	add("nodes.yaml", "Nodes", nodes, err)
	namespaces := make(map[string]bool)
	for _, s := range found {
		namespaces[s.Namespace] = true
	}
	for _, p := range pods {
		namespaces[p.Namespace] = true
	}
	for _, namespace := range slices.Sorted(maps.Keys(namespaces)) {
		b.namespaceParts(ctx, f, namespace, add)
	}
}

// namespaceParts adds the objects of a namespace of servers or agents with add.
func (b *bugreport) namespaceParts(
	ctx context.Context, f *fleet.Fleet, namespace string, add func(file, title string, objects any, err error),
) {
	folder := fileName(namespace) + "/"
	ours := metav1.ListOptions{LabelSelector: "app.kubernetes.io/part-of=slicecast"}
	sets, err := fleet.List(ctx, f, f.Client().AppsV1().DaemonSets(namespace).List, ours)
	add(folder+"daemonsets.yaml", "DaemonSets in "+namespace, sets, err)
	deployments, err := fleet.List(ctx, f, f.Client().AppsV1().Deployments(namespace).List, ours)
	add(folder+"deployments.yaml", "Deployments in "+namespace, deployments, err)
	config, err := f.ConfigMap(ctx, namespace, "slicecast-config")
	add(folder+"config.yaml", "Settings in "+namespace+", the ConfigMap slicecast-config", config, err)
	events, err := fleet.List(ctx, f, f.Client().CoreV1().Events(namespace).List, metav1.ListOptions{Limit: maxEvents})
	var lines []string
	if err == nil {
		lines = eventLines(events.Items)
	}
	add(folder+"events.yaml", "Events in "+namespace, lines, err)
}

// maxEvents bounds how many Events of a namespace are read.
const maxEvents = 1000

// eventLines returns a line for each Event, by time. Messages, which may say anything, are left
// out.
func eventLines(events []corev1.Event) (lines []string) {
	at := func(e corev1.Event) time.Time {
		return cmp.Or(e.LastTimestamp.Time, e.EventTime.Time, e.CreationTimestamp.Time)
	}
	slices.SortStableFunc(events, func(a, b corev1.Event) int { return at(a).Compare(at(b)) })
	for _, e := range events {
		lines = append(lines, fmt.Sprintf("%s %s %s %s/%s, %d times", at(e).UTC().Format(time.RFC3339), e.Type, e.Reason,
			e.InvolvedObject.Kind, e.InvolvedObject.Name, max(1, e.Count)))
	}
	return lines
}
