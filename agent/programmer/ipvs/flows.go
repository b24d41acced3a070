package ipvs

import (
	"bytes"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/internal/model"
)

// ledFrontends are the frontends from which IPVS leads connections, as keys of the tables' maps.
// They include both addresses and NodePorts.
type ledFrontends map[model.Family]map[string]bool

func (l ledFrontends) add(family model.Family, key string) {
	if l[family] == nil {
		l[family] = map[string]bool{}
	}
	l[family][key] = true
}

func (l ledFrontends) addTable(family model.Family, held elements) {
	for k := range held {
		if k.set == others.frontends() || k.set == others.nodePorts() {
			l.add(family, k.key)
		}
	}
}

// addService adds the frontend of a virtual service by address.
func (l ledFrontends) addService(k serviceKey) {
	l.add(k.family, addressKey(k.address)+portKey(protocolNumber(k.protocol), k.port))
}

// forget makes conntrack forget the connections that IPVS led from these frontends, once it no
// longer does. Otherwise the packets that clients still send would go nowhere, because nat looks
// only at new connections. After forget, nat treats them as new. UDP goes on with another backend.
// A backend resets an unknown TCP connection, so that clients connect again at once instead of
// waiting.
func (l ledFrontends) forget() error {
	socket, err := netlink.Open(unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer socket.Close()
	for family, keys := range l {
		var gone [][]byte
		err := socket.Flows(family, 0, func(f netlink.Flow) {
			if led(f, keys) {
				gone = append(gone, bytes.Clone(f.Attributes))
			}
		})
		if err != nil {
			return err
		}
		for _, attributes := range gone {
			if err := socket.RemoveFlow(family, attributes); err != nil {
				return err
			}
		}
	}
	return nil
}

// led reports whether IPVS leads a connection from one of the frontends. IPVS does if the replies
// come from an address or port to which the client does not send, and nat does not translate the
// connection.
func led(f netlink.Flow, frontends map[string]bool) bool {
	to := f.Original.Destination
	port := portKey(f.Original.Protocol, to.Port())
	return f.Status&nft.CtStatusDNAT == 0 && to != f.Reply.Source && (frontends[addressKey(to.Addr())+port] || frontends[port])
}
