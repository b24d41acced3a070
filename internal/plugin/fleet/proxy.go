package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
)

// setProxyName is what to do if the servers do not say which Services they serve.
const setProxyName = "set --service-proxy-name to their value, or to an empty one if they have none"

// ServiceProxyName returns the value of the label service.kubernetes.io/service-proxy-name of the
// Services that the servers serve, according to their command lines and configuration files. If it
// is empty, they serve the Services without the label. known is false if there are only relays,
// which serve what the servers above them do.
func (f *Fleet) ServiceProxyName(ctx context.Context, servers []*Server) (name string, known bool, err error) {
	var first *Server
	files := f.ConfigFiles()
	for _, s := range servers {
		if s.Relay || errors.Is(s.missing, errTerminating) || s.proxyName == nil && s.config == "" {
			continue
		}
		var fields struct{ ServiceProxyName string }
		its := &fields.ServiceProxyName
		if s.proxyName != nil {
			its = s.proxyName
		} else if err := files.Decode(ctx, s.Pod, s.Container, s.config, &fields); err != nil {
			return "", false, fmt.Errorf("the configuration of %v: %w; %s", s, err, setProxyName)
		}
		if first != nil && *its != name {
			return "", false, fmt.Errorf("%v has --service-proxy-name=%s, and %v has --service-proxy-name=%s: give all servers the same, or %s",
				first, name, s, *its, setProxyName)
		}
		first, name = cmp.Or(first, s), *its
	}
	return name, first != nil, nil
}
