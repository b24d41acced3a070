package pages

import (
	"encoding/json"
	"fmt"
	"maps"
	"mime"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

// component is the name of the program in /statusz and /flagz.
const component = "slicecast-agent"

// zGroup is the API group of the objects that /statusz and /flagz consist of, and zVersions are its
// versions. An answer has the version that was asked for; the versions have the same fields.
const zGroup = "config.k8s.io"

var zVersions = []string{"v1beta1", "v1alpha1"}

// zObject is what the objects of /statusz and /flagz begin with.
type zObject struct {
	Kind       string `json:"kind"`
	APIVersion string `json:"apiVersion"`
	Metadata   struct {
		Name string `json:"name"`
	} `json:"metadata"`
}

func newObject(kind string) zObject {
	o := zObject{Kind: kind}
	o.Metadata.Name = component
	return o
}

// flagz answers with the flags.
func (s *Server) flagz(w http.ResponseWriter, r *http.Request) {
	var lines strings.Builder
	for _, name := range slices.Sorted(maps.Keys(s.Flags)) {
		fmt.Fprintf(&lines, "%s=%s\n", name, s.Flags[name])
	}
	o := &struct {
		zObject
		Flags map[string]string `json:"flags,omitempty"`
	}{newObject("Flagz"), s.Flags}
	negotiate(w, r, &o.zObject, o, lines.String())
}

// statusz answers with the program's version, age and pages.
func (s *Server) statusz(w http.ResponseWriter, r *http.Request) {
	up := time.Since(s.started).Truncate(time.Second)
	paths := s.paths()
	o := &struct {
		zObject
		StartTime     string   `json:"startTime"`
		UptimeSeconds int64    `json:"uptimeSeconds"`
		GoVersion     string   `json:"goVersion"`
		BinaryVersion string   `json:"binaryVersion"`
		Paths         []string `json:"paths"`
	}{
		newObject("Statusz"), s.started.UTC().Format(time.RFC3339), int64(up.Seconds()), runtime.Version(), s.Version, paths,
	}
	seconds := o.UptimeSeconds
	negotiate(w, r, &o.zObject, o, fmt.Sprintf(
		"Started: %s\nUp: %d hr %02d min %02d sec\nGo version: %s\nBinary version: %s\nPaths: %s\n",
		s.started.Format(time.UnixDate), seconds/3600, seconds/60%60, seconds%60, o.GoVersion, o.BinaryVersion,
		strings.Join(paths, " ")))
}

// negotiate answers in the form that the request accepts: plain text unless it asks for an object
// as JSON or YAML, for example with "application/json;g=config.k8s.io;v=v1beta1;as=Statusz". head
// is the beginning of object, whose API version negotiate sets.
func negotiate(w http.ResponseWriter, r *http.Request, head *zObject, object any, plain string) {
	w.Header().Set("Vary", "Accept")
	accepted := strings.Join(r.Header.Values("Accept"), ",")
	if strings.TrimSpace(accepted) == "" {
		accepted = "text/plain"
	}
	for one := range strings.SplitSeq(accepted, ",") {
		kind, parameters, err := mime.ParseMediaType(one)
		if err != nil {
			continue
		}
		asked := parameters["as"] == head.Kind && parameters["g"] == zGroup && slices.Contains(zVersions, parameters["v"])
		head.APIVersion = zGroup + "/" + parameters["v"]
		switch {
		case kind == "text/plain", kind == "text/*", kind == "*/*":
			text(w, "\n"+component+" "+strings.ToLower(head.Kind)+"\nFor people: programs can ask for application/json;g="+zGroup+
				";v="+zVersions[0]+";as="+head.Kind+".\n\n"+plain)
			return
		case kind == "application/json" && asked:
			writeJSON(w, object)
			return
		case kind == "application/yaml" && asked:
			body, err := yaml.Marshal(object)
			write(w, kind, body, err)
			return
		}
	}
	http.Error(w, fmt.Sprintf("accept text/plain, or application/json or application/yaml with g=%s;v=%s;as=%s",
		zGroup, zVersions[0], head.Kind), http.StatusNotAcceptable)
}

// writeJSON answers with a value as JSON.
func writeJSON(w http.ResponseWriter, v any) {
	body, err := json.Marshal(v)
	write(w, "application/json", body, err)
}

// write answers with a body of the given type, unless err is set.
func write(w http.ResponseWriter, kind string, body []byte, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", kind)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = w.Write(body) // an error concerns only the client
}
