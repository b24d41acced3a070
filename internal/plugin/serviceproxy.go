package plugin

import (
	"context"

	"github.com/spf13/pflag"

	"github.com/slicecast/slicecast/internal/plugin/fleet"
)

// proxyNameFlag is the name of a flag of verify and explain, here and in agents.
const proxyNameFlag = "service-proxy-name"

// serviceProxy knows which Services the servers serve. The zero value asks their settings.
type serviceProxy struct {
	given string
	flag  *pflag.Flag
}

func (p *serviceProxy) addFlag(fs *pflag.FlagSet) {
	fs.StringVar(&p.given, proxyNameFlag, "", "Value of serviceProxyName in the servers' configuration. By default, the command lines of "+
		"their Pods and their ConfigMaps say it.")
	p.flag = fs.Lookup(proxyNameFlag)
}

// name returns the value of the label service.kubernetes.io/service-proxy-name of the Services that
// the servers serve: the flag's or, without the flag, what fleet.ServiceProxyName returns.
func (p serviceProxy) name(ctx context.Context, f *fleet.Fleet, servers []*fleet.Server) (name string, known bool, err error) {
	if p.flag != nil && p.flag.Changed {
		return p.given, true, nil
	}
	return f.ServiceProxyName(ctx, servers)
}

// proxyNameArguments returns the arguments by which the agents' commands know the name, if it is
// not empty.
func proxyNameArguments(name string) []string {
	if name == "" {
		return nil
	}
	return []string{"--" + proxyNameFlag + "=" + name}
}
