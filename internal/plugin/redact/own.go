package redact

import (
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
	allowServiceExternalIPs apiVersion besideKubeProxy bridgeInterface caFile checkpoint clientCertFile clientConnection clientKeyFile clusterCIDR
	conntrack detectLocal detectLocalMode drainLimit enableProfiling excludeCIDRs format healthzBindAddress insecurePlaintext interfaceNamePrefix iptables
	ipvs kind kubeconfig level localhostNodePorts logging manifests masqueradeAll masqueradeBit maxPerCore metricsBindAddress metricsCertFile
	metricsClientCAFile metricsKeyFile metricsServiceAccounts metricsTokenAudience min minSyncPeriod nodeName nodePortAddresses pages programmer
	programmerFallback scheduler secureMetricsBindAddress serverName serverService servers serviceProxyName source statusSocket strictARP syncPeriod
	tcpBeLiberal tcpCloseWaitTimeout tcpEstablishedTimeout tcpFinTimeout tcpTimeout tls tokenFile udpStreamTimeout udpTimeout variant
`)
)

// isFlag matches a flag without its value.
var isFlag = regexp.MustCompile(`^--?[a-z][a-z0-9-]{0,60}$`)

// commandLine returns the command line of a server or agent without what is not their own. Of words
// that are neither flags nor values of these, only that of the program is kept, if it is the first.
func commandLine(line []string, program bool) []string {
	out := make([]string, len(line))
	before := "" // the flag whose value the next word is
	for i, word := range line {
		flag, _, hasValue := strings.Cut(word, "=")
		name := strings.TrimLeft(flag, "-")
		isOwn := slices.Contains(OwnFlags, name)
		switch {
		case name == word && (before != "" || program && i == 0), name != flag && isOwn:
			out[i] = word
		case !isFlag.MatchString(flag):
			out[i] = LeftOut
		case hasValue:
			out[i] = flag + "=" + LeftOut
		default:
			out[i] = flag
		}
		before = ""
		if name != flag && isOwn && !hasValue {
			before = name
		}
	}
	return out
}

// Settings returns the agents' settings with their own fields only. What is no YAML is left out.
func (r *Redactor) Settings(text string) string {
	var fields map[string]any
	if yaml.Unmarshal([]byte(text), &fields) != nil {
		return LeftOut
	}
	out, err := yaml.Marshal(ownFields(fields))
	if err != nil {
		return LeftOut
	}
	return r.Text(string(out))
}

func ownFields(v any) any {
	fields, ok := v.(map[string]any)
	if !ok {
		return v
	}
	for name, value := range fields {
		if fields[name] = ownFields(value); !slices.Contains(OwnFields, name) {
			fields[name] = LeftOut
		}
	}
	return fields
}

// Address returns the host or port of the API server in the settings, if it can be one.
func Address(text string) string {
	if !isAddress.MatchString(text) {
		return LeftOut
	}
	return text
}

var isAddress = regexp.MustCompile(`^[\w.:\-]{1,253}$`)
