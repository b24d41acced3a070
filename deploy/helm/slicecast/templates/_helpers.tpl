{{/* The labels of an object: the root context, the object's name and its component. */}}
{{- define "slicecast.labels" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/component: {{ .component }}
{{ include "slicecast.commonLabels" .root }}
{{- end }}

{{/* The labels that all objects share. */}}
{{- define "slicecast.commonLabels" -}}
app.kubernetes.io/part-of: slicecast
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "_" | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/*
The Secret of the servers' certificate. Servers that make certificates themselves restore theirs, so
that it is never one that somebody else writes.
*/}}
{{- define "slicecast.certificateSecret" -}}
{{- .Values.certificates.secret | default (eq .Values.certificates.mode "self" | ternary "slicecast-server-tls" "slicecast-server-certificate") -}}
{{- end }}

{{/* An image: the root context and the image's name. */}}
{{- define "slicecast.image" -}}
{{- $image := .root.Values.image -}}
{{ $image.registry }}/{{ .name }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* The part of a Pod's spec about pulling. */}}
{{- define "slicecast.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* The name of the servers in their certificate. */}}
{{- define "slicecast.serverName" -}}
slicecast-server.{{ .Values.namespaces.servers }}.svc
{{- end }}

{{/* The security context of containers that need nothing. */}}
{{- define "slicecast.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* What a ConfigMap of kube-system has under a key, as YAML, or nothing. */}}
{{- define "slicecast.kubeSystem" -}}
{{- $map := lookup "v1" "ConfigMap" "kube-system" .name -}}
{{- dig "data" .key "" $map -}}
{{- end }}

{{/* The settings of an earlier install, which hold unless values replace them. */}}
{{- define "slicecast.installed" -}}
{{- lookup "v1" "ConfigMap" .Values.namespaces.agents "slicecast-config" | dig "data" dict | toJson -}}
{{- end }}

{{/*
The address of the API server as host:port. The first source that has one decides. An address of
loopback counts for nothing, because it is another machine in each Pod and node.
*/}}
{{- define "slicecast.apiServer" -}}
{{- $found := list .Values.apiServer -}}
{{- if not .Values.apiServer -}}
  {{- $installed := include "slicecast.installed" . | fromJson -}}
  {{- with $installed.apiServerHost -}}
    {{- $found = append $found (printf "%s:%s" (contains ":" . | ternary (printf "[%s]" .) .) $installed.apiServerPort) -}}
  {{- end -}}
  {{- $kubeadm := include "slicecast.kubeSystem" (dict "name" "kubeadm-config" "key" "ClusterConfiguration") | fromYaml -}}
  {{- with $kubeadm.controlPlaneEndpoint -}}
    {{- $found = append $found (regexMatch ":[0-9]+$" . | ternary . (printf "%s:6443" .)) -}}
  {{- end -}}
  {{- $kubeProxy := include "slicecast.kubeSystem" (dict "name" "kube-proxy" "key" "kubeconfig.conf") | fromYaml -}}
  {{- range $kubeProxy.clusters -}}
    {{- $server := .cluster.server | trimPrefix "https://" | trimSuffix "/" -}}
    {{- $found = append $found (regexMatch ":[0-9]+$" $server | ternary $server (printf "%s:443" $server)) -}}
  {{- end -}}
  {{- $endpoints := list -}}
  {{- $slice := lookup "discovery.k8s.io/v1" "EndpointSlice" "default" "kubernetes" -}}
  {{- range $slice.endpoints -}}
    {{- range .addresses -}}
      {{- $endpoints = append $endpoints (printf "%s:%v" (contains ":" . | ternary (printf "[%s]" .) .) (first $slice.ports).port) -}}
    {{- end -}}
  {{- end -}}
  {{- $usable := list -}}
  {{- range $found -}}
    {{- if and . (not (regexMatch "^(127\\.|localhost:|\\[::1\\])" .)) -}}
      {{- $usable = append $usable . -}}
    {{- end -}}
  {{- end -}}
  {{- if and (not $usable) (eq (len $endpoints) 1) -}}
    {{- $usable = $endpoints -}}
  {{- end -}}
  {{- $found = $usable -}}
  {{- if not $found -}}
    {{- $why := "no cluster was asked, or it has neither controlPlaneEndpoint in kube-system/kubeadm-config, nor a server in kube-system/kube-proxy, nor an endpoint of the Service default/kubernetes" -}}
    {{- if $endpoints -}}
      {{- $why = printf "the cluster has several API servers (%s)" (join ", " $endpoints) -}}
    {{- end -}}
    {{- fail (printf "\n\napiServer is not set and was not found: %s.\nSet it to the address of the API server outside of the Service kubernetes, best that of a load balancer: --set apiServer=api.example.com:6443\n" $why) -}}
  {{- end -}}
{{- end -}}
{{- first $found -}}
{{- end }}

{{/* The address of the API server as the variables of a ConfigMap. */}}
{{- define "slicecast.apiServerData" -}}
{{- $address := include "slicecast.apiServer" . -}}
{{- $port := regexFind "[0-9]+$" $address -}}
apiServerHost: {{ $address | trimSuffix (printf ":%s" $port) | trimAll "[]" | quote }}
apiServerPort: {{ $port | quote }}
{{- end }}

{{/* The environment that makes clients of the API server use that address. */}}
{{- define "slicecast.apiServerEnv" -}}
# These replace the virtual IP of the API server; see the ConfigMap.
- name: KUBERNETES_SERVICE_HOST
  valueFrom:
    configMapKeyRef: {name: slicecast-config, key: apiServerHost}
- name: KUBERNETES_SERVICE_PORT
  valueFrom:
    configMapKeyRef: {name: slicecast-config, key: apiServerPort}
{{- end }}

{{/* The fields of the agents' settings that say which addresses are those of pods. */}}
{{- define "slicecast.podRanges" -}}
{{- $mode := .Values.agent.config.detectLocalMode | default "ClusterCIDR" -}}
{{- if and .Values.podCIDRs (ne $mode "ClusterCIDR") -}}
  {{- fail (printf "\n\npodCIDRs and agent.config.detectLocalMode exclude each other: %s does not use ranges.\nRemove one of them.\n" $mode) -}}
{{- else if .Values.podCIDRs -}}
  {{- dict "clusterCIDR" (join "," .Values.podCIDRs) | toYaml -}}
{{- else if ne $mode "ClusterCIDR" -}}
  {{- dict | toYaml -}}
{{- else -}}
  {{- $installed := (include "slicecast.installed" . | fromJson) -}}
  {{- $installed = get $installed "agent.yaml" | default "" | fromYaml -}}
  {{- $kubeadm := include "slicecast.kubeSystem" (dict "name" "kubeadm-config" "key" "ClusterConfiguration") | fromYaml -}}
  {{- $kubeProxy := include "slicecast.kubeSystem" (dict "name" "kube-proxy" "key" "config.conf") | fromYaml -}}
  {{- $nodes := (lookup "v1" "Node" "" "").items -}}
  {{- $ranged := list -}}
  {{- range $nodes -}}
    {{- if .spec.podCIDRs -}}
      {{- $ranged = append $ranged .metadata.name -}}
    {{- end -}}
  {{- end -}}
  {{- if $installed.clusterCIDR -}}
    {{- dict "clusterCIDR" $installed.clusterCIDR | toYaml -}}
  {{- else if eq ($installed.detectLocalMode | default "") "NodeCIDR" -}}
    {{- dict "detectLocalMode" "NodeCIDR" | toYaml -}}
  {{- else if dig "networking" "podSubnet" "" $kubeadm -}}
    {{- dict "clusterCIDR" $kubeadm.networking.podSubnet | toYaml -}}
  {{- else if $kubeProxy.clusterCIDR -}}
    {{- dict "clusterCIDR" $kubeProxy.clusterCIDR | toYaml -}}
  {{- else if and $nodes (eq (len $nodes) (len $ranged)) -}}
    {{- dict "detectLocalMode" "NodeCIDR" | toYaml -}}
  {{- else -}}
    {{- fail "\n\npodCIDRs is not set and was not found: no cluster was asked, or it has neither podSubnet in kube-system/kubeadm-config, nor clusterCIDR in kube-system/kube-proxy, nor podCIDRs on all Nodes.\nSet it to the address ranges of all pods, one for each IP family: --set 'podCIDRs={10.244.0.0/16,fd00:10:244::/56}'\n" -}}
  {{- end -}}
{{- end -}}
{{- end }}

{{/* The container that makes a Pod ready once its init container has cleaned the node. */}}
{{- define "slicecast.done" -}}
containers:
- name: done
  image: {{ .Values.cleanup.doneImage }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    {{- include "slicecast.confined" . | nindent 4 }}
  resources:
    requests: {cpu: 1m, memory: 8Mi}
{{- end }}

{{/* The client certificate of Prometheus in a tlsConfig: the name of its Secret, or nothing. */}}
{{- define "slicecast.certificateOfScraper" -}}
{{- with . -}}
cert:
  secret: {name: {{ . }}, key: tls.crt}
keySecret: {name: {{ . }}, key: tls.key}
{{- end }}
{{- end }}

{{/* The token of Prometheus in an endpoint of a PodMonitor: the name of its Secret, or nothing. */}}
{{- define "slicecast.tokenOfScraper" -}}
{{- with . -}}
authorization:
  credentials: {name: {{ . }}, key: token}
{{- end }}
{{- end }}

{{/*
The endpoint of agents in a PodMonitor, which ends with its relabelings. The Pods declare no port:
it would be one of the node, and a Pod whose port another one has is not scheduled.
*/}}
{{- define "slicecast.agentEndpoint" -}}
{{- with .Values.monitoring -}}
{{- $port := ternary .agents.port 8476 (ne .agents.servingSecret "") -}}
scheme: https
interval: {{ .podMonitors.interval }}
tlsConfig:
  {{- with .agents.servingSecret }}
  serverName: {{ $.Values.monitoring.agents.serverName }}
  ca:
    secret: {name: {{ . }}, key: ca.crt}
  {{- else }}
  # Agents make their certificates, as kubelets do. The token is of use at agents only.
  insecureSkipVerify: true
  {{- end }}
  {{- include "slicecast.certificateOfScraper" .podMonitors.clientSecret | nindent 2 }}
{{- include "slicecast.tokenOfScraper" .podMonitors.tokenSecret | nindent 0 }}
relabelings:
- {sourceLabels: [__meta_kubernetes_pod_container_name], regex: agent, action: keep}
- {sourceLabels: [__meta_kubernetes_pod_ip], regex: '([^:]+)', targetLabel: __address__, replacement: '$1:{{ $port }}'}
- {sourceLabels: [__meta_kubernetes_pod_ip], regex: '(.*:.*)', targetLabel: __address__, replacement: '[$1]:{{ $port }}'}
{{- end }}
{{- end }}

{{/*
Whether agents have a PodMonitor. They accept the certificate of Prometheus if they have the
servingSecret, whose ca.crt verifies it, and tokens if agent.metrics is enabled.
*/}}
{{- define "slicecast.agentsScraped" -}}
{{- with .Values.monitoring -}}
{{- if .podMonitors.enabled -}}
{{- if or (and .podMonitors.clientSecret .agents.servingSecret) (and .podMonitors.tokenSecret ($.Values.agent.metrics).enabled) -}}
true
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
