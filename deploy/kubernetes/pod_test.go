// This file stands for a kubelet: it creates Pods from the templates of the manifests, with their
// volumes, tokens and environment, and runs their containers and probes.
package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/slicecast/slicecast/internal/logtest"
	"github.com/slicecast/slicecast/internal/testenv"
)

const (
	// deadline bounds the time of a single step. All steps together take a second or two on an idle
	// machine.
	deadline     = time.Minute
	pollInterval = 20 * time.Millisecond
	// volumesDir is on the tmpfs that the tests have at /run, where every user may read.
	volumesDir = "/run/slicecast-volumes"
	// accountDir is where clients of the API server look for the credentials of a Pod's
	// ServiceAccount.
	accountDir = "/var/run/secrets/kubernetes.io/serviceaccount"
)

// pod is a Pod of the cluster whose containers this process runs in place of a kubelet.
type pod struct {
	t    *testing.T
	host *testenv.Host
	*corev1.Pod
}

// newPod creates a Pod from the template of a workload on a node. host is where the Pod's
// containers run, whether they use the node's network or another one.
func newPod(t *testing.T, template corev1.PodTemplateSpec, name, node string, host *testenv.Host) *pod {
	t.Helper()
	ctx, client := t.Context(), cluster.Client().CoreV1()
	p := &corev1.Pod{ObjectMeta: *template.ObjectMeta.DeepCopy(), Spec: *template.Spec.DeepCopy()}
	p.Name, p.Spec.NodeName = name, node
	created, err := client.Pods(p.Namespace).Create(ctx, p, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, client.Pods(p.Namespace).Delete(context.Background(), name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))}))
	})
	return &pod{t, host, created}
}

// setReady reports the Pod's address and that the Pod is ready, as a kubelet does after a
// successful probe.
func (p *pod) setReady() {
	p.t.Helper()
	p.Status.Phase = corev1.PodRunning
	p.Status.PodIP = p.host.IPv4.String()
	p.Status.PodIPs = []corev1.PodIP{{IP: p.Status.PodIP}}
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	updated, err := cluster.Client().CoreV1().Pods(p.Namespace).UpdateStatus(p.t.Context(), p.Pod, metav1.UpdateOptions{})
	require.NoError(p.t, err)
	p.Pod = updated
}

// process is a container that was started.
type process struct {
	t    *testing.T
	name string
	pod  *pod
	spec corev1.Container
	cmd  *testenv.Cmd
	logs *logtest.Buffer
	done chan error // receives the result of the process, then is closed
}

// start starts a container of the Pod exactly as specified.
func (p *pod) start(c corev1.Container) *process {
	p.t.Helper()
	require.Empty(p.t, c.Command, "the entry points of the images are the commands")
	env := p.env(c)
	args := make([]string, len(c.Args))
	for i, a := range c.Args {
		args[i] = regexp.MustCompile(`\$\((\w+)\)`).ReplaceAllStringFunc(a, func(s string) string {
			value, ok := env[s[2:len(s)-1]]
			require.True(p.t, ok, "%s refers to a variable that is not set", a)
			return value
		})
	}
	confined, err := json.Marshal(p.confinement(c))
	require.NoError(p.t, err)

	r := &process{t: p.t, name: p.Name, pod: p, spec: c, logs: &logtest.Buffer{}, done: make(chan error, 1)}
	r.cmd = p.host.Command(context.Background(), "/proc/self/exe", args...)
	r.cmd.Env = []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		containerVariable + "=" + string(confined), imageVariable + "=" + commandOf(c.Image),
	}
	for name, value := range env {
		r.cmd.Env = append(r.cmd.Env, name+"="+value)
	}
	r.cmd.Stdout, r.cmd.Stderr = r.logs, r.logs
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	require.NoError(p.t, r.cmd.Start())
	go func() {
		r.done <- r.cmd.Wait()
		close(r.done)
	}()
	p.t.Cleanup(func() {
		if p.t.Failed() {
			p.t.Logf("---- %s:\n%s", r.name, r.logs)
		}
		_ = r.cmd.Process.Kill() // an error means that it has ended already
		_ = r.wait()             // a killed process returns an error
	})
	return r
}

// commandOf returns the name of the command that is in an image.
func commandOf(image string) string {
	name, _, _ := strings.Cut(image[strings.LastIndex(image, "/")+1:], ":")
	return strings.TrimSuffix(name, "-iptables")
}

// env returns the environment variables that a kubelet would set in the container.
func (p *pod) env(c corev1.Container) map[string]string {
	p.t.Helper()
	// The virtual IP of the Service "kubernetes", which no programmer serves here.
	env := map[string]string{"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
	for _, e := range c.Env {
		switch from := e.ValueFrom; {
		case from == nil:
			env[e.Name] = e.Value
		case from.FieldRef != nil:
			require.Equal(p.t, "spec.nodeName", from.FieldRef.FieldPath)
			env[e.Name] = p.Spec.NodeName
		case from.ConfigMapKeyRef != nil:
			ref := from.ConfigMapKeyRef
			m, err := cluster.Client().CoreV1().ConfigMaps(p.Namespace).Get(p.t.Context(), ref.Name, metav1.GetOptions{})
			require.NoError(p.t, err)
			value, ok := m.Data[ref.Key]
			require.True(p.t, ok || ptr.Deref(ref.Optional, false), ref.Key)
			if ok {
				env[e.Name] = value
			}
		default:
			require.Fail(p.t, "unknown source of an environment variable", e.Name)
		}
	}
	return env
}

// confinement returns how the security contexts and volumes confine the container.
func (p *pod) confinement(c corev1.Container) container {
	p.t.Helper()
	s, ps := c.SecurityContext, p.Spec.SecurityContext
	require.True(p.t, ptr.Deref(s.ReadOnlyRootFilesystem, false))
	out := container{
		UID: int(ptr.Deref(s.RunAsUser, ptr.Deref(ps.RunAsUser, 0))), GID: int(ptr.Deref(ps.RunAsGroup, 0)),
		FSGroup: int(ptr.Deref(ps.FSGroup, 0)), Privileged: ptr.Deref(s.Privileged, false),
	}
	if !out.Privileged {
		require.Equal(p.t, []corev1.Capability{"ALL"}, s.Capabilities.Drop)
		out.NoNewPrivs = !*s.AllowPrivilegeEscalation
		for _, name := range s.Capabilities.Add {
			out.Capabilities = append(out.Capabilities, string(name))
		}
	}
	for _, m := range c.VolumeMounts {
		for _, v := range p.Spec.Volumes {
			if v.Name != m.Name || !exists(v) {
				continue
			}
			out.Mounts = append(out.Mounts, mount{p.volume(v, out.FSGroup), m.MountPath, m.ReadOnly})
		}
	}
	if ptr.Deref(p.Spec.AutomountServiceAccountToken, true) {
		files := map[string][]byte{"token": []byte(p.token(nil)), "ca.crt": cluster.AdminConfig().CAData, "namespace": []byte(p.Namespace)}
		out.Mounts = append(out.Mounts, mount{p.write("account", files, 0o644, out.FSGroup), accountDir, true})
	}
	for _, m := range out.Mounts {
		if _, err := os.Stat(m.Target); errors.Is(err, os.ErrNotExist) {
			require.Regexp(p.t, "^(/var)?/run/", m.Target, "the test can create mount points only below /run")
			require.NoError(p.t, os.MkdirAll(m.Target, 0o755))
		}
	}
	return out
}

// exists reports whether a volume has something to mount. If a directory of the node does not exist
// and must not be created, such as that of kernel modules, container runtimes mount an empty
// directory.
func exists(v corev1.Volume) bool {
	if v.HostPath == nil || ptr.Deref(v.HostPath.Type, "") != "" {
		return true
	}
	_, err := os.Stat(v.HostPath.Path)
	return err == nil
}

// volume creates a volume and returns its path.
func (p *pod) volume(v corev1.Volume, group int) string {
	p.t.Helper()
	ctx, client := p.t.Context(), cluster.Client().CoreV1()
	switch {
	case v.Secret != nil:
		s, err := client.Secrets(p.Namespace).Get(ctx, v.Secret.SecretName, metav1.GetOptions{})
		require.NoError(p.t, err)
		return p.write(v.Name, s.Data, os.FileMode(ptr.Deref(v.Secret.DefaultMode, 0o644)), group)
	case v.ConfigMap != nil:
		m, err := client.ConfigMaps(p.Namespace).Get(ctx, v.ConfigMap.Name, metav1.GetOptions{})
		require.True(p.t, err == nil || apierrors.IsNotFound(err) && ptr.Deref(v.ConfigMap.Optional, false), err)
		files := map[string][]byte{}
		for name, content := range m.Data {
			files[name] = []byte(content)
		}
		return p.write(v.Name, files, 0o644, group)
	case v.Projected != nil:
		return p.write(v.Name, p.projected(v.Projected.Sources), 0o644, group)
	case v.EmptyDir != nil:
		dir := p.write(v.Name, nil, 0, group)
		require.NoError(p.t, os.Chmod(dir, 0o777))
		return dir
	case v.HostPath != nil:
		switch ptr.Deref(v.HostPath.Type, "") {
		case corev1.HostPathFileOrCreate:
			f, err := os.OpenFile(v.HostPath.Path, os.O_CREATE, 0o600)
			require.NoError(p.t, err)
			require.NoError(p.t, f.Close())
		case corev1.HostPathDirectoryOrCreate:
			dir := hostDir(p.Spec.NodeName, v.HostPath.Path)
			require.NoError(p.t, os.MkdirAll(dir, 0o755))
			return dir
		}
		return v.HostPath.Path
	default:
		require.Fail(p.t, "unknown kind of volume", v.Name)
		return ""
	}
}

// projected returns the files of a projected volume.
func (p *pod) projected(sources []corev1.VolumeProjection) map[string][]byte {
	p.t.Helper()
	files := map[string][]byte{}
	for _, s := range sources {
		switch {
		case s.ServiceAccountToken != nil:
			files[s.ServiceAccountToken.Path] = []byte(p.token(s.ServiceAccountToken))
		case s.ConfigMap != nil:
			// No controller here creates this ConfigMap in each namespace.
			require.Equal(p.t, "kube-root-ca.crt", s.ConfigMap.Name)
			require.Equal(p.t, []corev1.KeyToPath{{Key: "ca.crt", Path: "ca.crt"}}, s.ConfigMap.Items)
			files["ca.crt"] = cluster.AdminConfig().CAData
		case s.DownwardAPI != nil:
			for _, f := range s.DownwardAPI.Items {
				require.Equal(p.t, "metadata.namespace", f.FieldRef.FieldPath)
				files[f.Path] = []byte(p.Namespace)
			}
		default:
			require.Fail(p.t, "unknown source of a projected volume")
		}
	}
	return files
}

// hostDir returns the directory that stands for a directory of a node. Nodes share the file system
// of this machine.
func hostDir(node, path string) string { return filepath.Join(volumesDir, "host-"+node, path) }

// write creates a volume with files that a group may read, and returns its path.
func (p *pod) write(name string, files map[string][]byte, mode os.FileMode, group int) string {
	p.t.Helper()
	dir := filepath.Join(volumesDir, p.Name, name)
	require.NoError(p.t, os.MkdirAll(dir, 0o755))
	for file, content := range maps.All(files) {
		path := filepath.Join(dir, file)
		require.NoError(p.t, os.WriteFile(path, content, mode))
		// In a user namespace with only one user, files keep that owner and group.
		if err := os.Chown(path, 0, group); !errors.Is(err, syscall.EINVAL) {
			require.NoError(p.t, err)
		}
	}
	return dir
}

// token requests a token that is bound to the Pod, as a kubelet does. Without a projection it has
// the API server's audience.
func (p *pod) token(projection *corev1.ServiceAccountTokenProjection) string {
	p.t.Helper()
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: p.Name, UID: p.UID},
	}}
	if projection != nil {
		if projection.Audience != "" {
			request.Spec.Audiences = []string{projection.Audience}
		}
		request.Spec.ExpirationSeconds = projection.ExpirationSeconds
	}
	answer, err := cluster.Client().CoreV1().ServiceAccounts(p.Namespace).CreateToken(
		p.t.Context(), p.Spec.ServiceAccountName, request, metav1.CreateOptions{})
	require.NoError(p.t, err)
	return answer.Status.Token
}

// awaitReady repeats the container's readiness probe until it succeeds.
func (r *process) awaitReady() {
	r.t.Helper()
	probe := r.spec.ReadinessProbe.HTTPGet
	host, port := probe.Host, probe.Port.IntValue()
	if host == "" {
		host = r.pod.host.IPv4.String()
	}
	for _, p := range r.spec.Ports {
		if p.Name == probe.Port.StrVal {
			port = int(p.ContainerPort)
		}
	}
	transport := &http.Transport{DisableKeepAlives: true, DialContext: r.pod.host.DialContext}
	url := "http://" + net.JoinHostPort(host, fmt.Sprint(port)) + probe.Path
	testenv.Eventually(r.t, deadline, func() error {
		select {
		case err := <-r.done:
			return fmt.Errorf("the container has ended: %w\n%s", err, r.logs)
		default:
		}
		request, err := http.NewRequestWithContext(r.t.Context(), http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		response, err := transport.RoundTrip(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return errors.New(response.Status)
		}
		return nil
	})
}

// terminate sends SIGTERM to the container, as a kubelet does, waits for it and returns its error.
func (r *process) terminate() error {
	r.t.Helper()
	require.NoError(r.t, r.cmd.Process.Signal(syscall.SIGTERM))
	return r.wait()
}

// wait waits for the container to end and returns its error.
func (r *process) wait() error {
	r.t.Helper()
	select {
	case err := <-r.done:
		return err
	case <-time.After(deadline):
		require.Fail(r.t, "the container does not end", r.name)
		return nil
	}
}

// shell runs a script in a directory.
func shell(t *testing.T, dir, script string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
}
