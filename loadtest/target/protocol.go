// Package target is the server that a load test is run against, as a process of its own whose CPU time and memory can be
// told apart from the nodes': slicecast-server's own parts (server/app) with generated state instead of a cluster's. Beside
// them it has a floor.Server.
//
// The parent writes lines of JSON to the process's standard input, and reads one line in answer to each from its standard
// output:
//
//	{"setup": {…}}   serve this state                   {"address": "127.0.0.1:…"}
//	{"churn": {…}}   carry out this plan                {"lag": {…}}, when it is done
//	{"memory": {}}   collect garbage and count memory   {"memory": {…}}
//	{"listen": {}}   take connections of the floor      {"address": "127.0.0.1:…"}
//	{"write": {…}}   write to all of them               {"lag": {…}}, when it is done
//
// Any is answered with {"error": "…"} where it fails. The process ends when its input does.
package target

import (
	"github.com/slicecast/slicecast/loadtest/floor"
	"github.com/slicecast/slicecast/loadtest/generate"
)

// Setup says what to serve, and with what certificates, all in PEM.
type Setup struct {
	// Address to serve on; empty: any of loopback.
	Address string          `json:"address,omitempty"`
	Cluster generate.Config `json:"cluster"`
	// Changed is how many of the cluster's changes have been made already.
	Changed     int    `json:"changed"`
	Certificate []byte `json:"certificate"`
	PrivateKey  []byte `json:"privateKey"`
	ClientCA    []byte `json:"clientCA"`
}

// Memory is what the server's process has in use, without garbage, in bytes.
type Memory struct {
	Heap   int64 `json:"heap"`
	Stacks int64 `json:"stacks"`
}

type request struct {
	Setup  *Setup         `json:"setup,omitempty"`
	Churn  *generate.Plan `json:"churn,omitempty"`
	Memory *struct{}      `json:"memory,omitempty"`
	Listen *struct{}      `json:"listen,omitempty"`
	Write  *floor.Writes  `json:"write,omitempty"`
}

type answer struct {
	Address string        `json:"address,omitempty"`
	Lag     *generate.Lag `json:"lag,omitempty"`
	Memory  *Memory       `json:"memory,omitempty"`
	Error   string        `json:"error,omitempty"`
}
