// Package target is the server that a load test is run against, as a process of its own whose CPU time and memory can be
// told apart from the nodes': slicecast-server's own parts (server/app) with generated state instead of a cluster's.
//
// The parent writes lines of JSON to the process's standard input, and reads one line in answer to each from its standard
// output:
//
//	{"setup": {…}}   serve this state              {"address": "127.0.0.1:…"}
//	{"churn": {…}}   carry out this plan           {"lag": {…}}, when it is done
//
// Either is answered with {"error": "…"} where it fails. The process ends when its input does.
package target

import "github.com/slicecast/slicecast/loadtest/generate"

// Setup says what to serve, and with what certificates, all in PEM.
type Setup struct {
	Cluster     generate.Config `json:"cluster"`
	Certificate []byte          `json:"certificate"`
	PrivateKey  []byte          `json:"privateKey"`
	ClientCA    []byte          `json:"clientCA"`
}

type request struct {
	Setup *Setup         `json:"setup,omitempty"`
	Churn *generate.Plan `json:"churn,omitempty"`
}

type answer struct {
	Address string        `json:"address,omitempty"`
	Lag     *generate.Lag `json:"lag,omitempty"`
	Error   string        `json:"error,omitempty"`
}
