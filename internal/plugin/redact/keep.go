package redact

import (
	"encoding/json"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// OwnFlags are the flags of servers and agents, and OwnFields the fields of the agents' settings.
// Values of others are left out, whatever they are.
var (
	OwnFlags = strings.Fields(`
	advertise-servers agent-service-account allow-service-external-ips beside-kube-proxy bind-address ca-config-map ca-file checkpoint client-ca-file
	client-cert-file client-key-file cluster-cidr config conntrack-max-per-core conntrack-min conntrack-tcp-be-liberal conntrack-tcp-timeout-close-wait
	conntrack-tcp-timeout-established conntrack-udp-timeout conntrack-udp-timeout-stream debug-socket detect-local-mode drain-window healthz-bind-address
	heartbeat-interval init-only insecure-plaintext iptables-localhost-nodeports iptables-masquerade-bit iptables-min-sync-period iptables-sync-period
	iptables-variant ipvs-drain-limit ipvs-exclude-cidrs ipvs-scheduler ipvs-strict-arp ipvs-tcp-timeout ipvs-tcpfin-timeout ipvs-udp-timeout kubeconfig
	log-format log-level manifests masquerade-all max-behind-wait max-cold-sync-bytes metrics-bind-address metrics-cert-file metrics-client-ca-file
	metrics-key-file metrics-service-accounts metrics-token-audience node-name nodeport-addresses page pages pod-bridge-interface
	pod-interface-name-prefix profiling programmer programmer-fallback relay-service-account secure-metrics-bind-address server-name server-service
	servers service-proxy-name shards shutdown-grace-period source status-socket tls-cert-file tls-private-key-file tls-secret token-audience token-file
	tombstones upstream-ca-file upstream-client-cert-file upstream-client-key-file upstream-insecure-plaintext upstream-server-name upstream-servers
	upstream-token-file v
`)
	OwnFields = strings.Fields(`
	allowServiceExternalIPs apiVersion besideKubeProxy bridgeInterface caConfigMap caFile checkpoint clientCertFile clientConnection clientKeyFile
	clusterCIDR conntrack detectLocal detectLocalMode drainLimit enableProfiling excludeCIDRs format healthzBindAddress insecurePlaintext
	interfaceNamePrefix iptables ipvs kind kubeconfig level localhostNodePorts logging manifests masqueradeAll masqueradeBit maxPerCore
	metricsBindAddress metricsCertFile metricsClientCAFile metricsKeyFile metricsServiceAccounts metricsTokenAudience min minSyncPeriod nodeName
	nodePortAddresses pages programmer programmerFallback scheduler secureMetricsBindAddress serverName servers serverService serviceProxyName source
	statusSocket strictARP syncPeriod tcpBeLiberal tcpCloseWaitTimeout tcpEstablishedTimeout tcpFinTimeout tcpTimeout tls tokenFile udpStreamTimeout
	udpTimeout variant
`)
)

// fields are the fields of Kubernetes' objects that are kept. Those of whole are kept with all that
// is in them. Neither has messages, which may say anything.
var (
	fields = append(strings.Fields(`
	annotations apiVersion architecture args audience automountServiceAccountToken availableReplicas command conditions configMap configMapKeyRef
	configMapRef containerPort containerRuntimeVersion containers containerStatuses creationTimestamp currentNumberScheduled data defaultMode
	deletionTimestamp desiredNumberScheduled dnsPolicy emptyDir env envFrom exitCode expirationSeconds failureThreshold fieldPath fieldRef finishedAt
	generation host hostIP hostNetwork hostPath hostPort httpGet image imageID imagePullPolicy imagePullSecrets initContainers initContainerStatuses
	initialDelaySeconds ip items kernelVersion key kind kubeletVersion kubeProxyVersion lastHeartbeatTime lastProbeTime lastState lastTransitionTime
	lastUpdateTime livenessProbe maxSurge maxUnavailable medium metadata mode mountPath name namespace nodeInfo nodeName numberAvailable numberMisscheduled
	numberReady numberUnavailable observedGeneration operatingSystem optional osImage ownerReferences path periodSeconds phase podCIDRs podIP podIPs port
	ports prefix priority priorityClassName projected protocol qosClass readinessProbe readOnly ready readyReplicas reason replicas resourceVersion
	restartCount restartPolicy rollingUpdate running secret secretKeyRef secretName secretRef serviceAccountName serviceAccountToken sizeLimit sources spec
	started startedAt startTime startupProbe state status strategy subPath template terminated terminationGracePeriodSeconds timeoutSeconds type uid
	unavailableReplicas unschedulable updatedNumberScheduled updatedReplicas updateStrategy valueFrom volumeMounts volumes waiting
`), whole...)
	whole = strings.Fields(`
	addresses affinity labels matchLabels nodeSelector resources securityContext selector taints tolerations topologySpreadConstraints
`)
)

// ownAnnotations begin the names of the annotations that are kept.
const ownAnnotations = "slicecast.io/"

// YAML returns an object of Kubernetes' types, or a list of them, as YAML with the fields that are
// kept. A ConfigMap is that of the settings. The values of the environment, and of annotations that
// are secrets by their names or forms, are left out of what comes later, too. main is the container
// whose command line is kept; if it is empty, it is the first one.
func (r *Redactor) YAML(object any, main string) ([]byte, error) {
	text, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	var value any
	if err := yaml.Unmarshal(text, &value); err != nil {
		return nil, err
	}
	return yaml.Marshal(r.keep("", value, fields, main))
}

// keep returns what is kept of a field's value.
func (r *Redactor) keep(field string, v any, allowed []string, main string) any {
	switch v := v.(type) {
	case string:
		return r.Text(v)
	case []any:
		for i := range v {
			c, _ := v[i].(map[string]any)
			if name, ok := c["name"].(string); ok && field == "containers" && main == "" {
				main = name
			}
			v[i] = r.keep(field, v[i], allowed, main)
		}
	case map[string]any:
		_, hasCommand := v["command"]
		for name, value := range v {
			text, _ := value.(string)
			words, isCommand := value.([]any)
			isCommand = isCommand && (name == "command" || name == "args")
			switch {
			case field == "data":
				v[name] = r.setting(name, text)
			case slices.Contains(whole, field), field == "annotations" && strings.HasPrefix(name, ownAnnotations):
				v[name] = r.keep(field, value, allowed, main)
			case field == "annotations" && IsSecret(name, text), field == "env" && name == "value" && !isAddress(text):
				r.Know(text)
				v[name] = LeftOut
			case field == "annotations", !slices.Contains(allowed, name), isCommand && v["name"] != main:
				v[name] = LeftOut
			case isCommand:
				v[name] = r.keep(name, commandLine(words, name == "command" || !hasCommand), allowed, main)
			default:
				v[name] = r.keep(name, value, allowed, main)
			}
		}
	}
	return v
}

// isAddress reports whether a value is an IP address, which is of use in logs.
func isAddress(text string) bool {
	_, err := netip.ParseAddr(text)
	return err == nil
}

// isFlag matches a flag without its value.
var isFlag = regexp.MustCompile(`^--?[a-z][a-z0-9-]{0,60}$`)

// commandLine returns the command line of a server or agent with its own flags and their values,
// and with the names of other flags. It leaves out all other words, except for the first one if
// that is the program.
func commandLine(line []any, program bool) []any {
	before := false // the word before is an own flag without its value
	for i := range line {
		word, _ := line[i].(string)
		flag, _, hasValue := strings.Cut(word, "=")
		name := strings.TrimLeft(flag, "-")
		isOwn := name != flag && slices.Contains(OwnFlags, name)
		switch {
		case isOwn, name == flag && (before || program && i == 0):
		case !isFlag.MatchString(flag):
			line[i] = LeftOut
		case hasValue:
			line[i] = flag + "=" + LeftOut
		}
		before = isOwn && !hasValue
	}
	return line
}

// setting returns what is kept of a value of the ConfigMap of the settings.
func (r *Redactor) setting(name, text string) string {
	var settings map[string]any
	switch {
	case (name == "apiServerHost" || name == "apiServerPort") && address.MatchString(text):
		return text
	case name == "agent.yaml" && yaml.Unmarshal([]byte(text), &settings) == nil:
		if out, err := yaml.Marshal(r.keep("", settings, OwnFields, "")); err == nil {
			return string(out)
		}
	}
	return LeftOut
}

var address = regexp.MustCompile(`^[\w.:\-]{1,253}$`)
