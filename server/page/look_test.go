// These tests prove, in a real browser, what people see of the page: with a mouse, with a keyboard
// alone, and with a screen reader. Hostile names are text, and the page violates nothing of its
// Content-Security-Policy.
package page

import (
	"encoding/json"
	"flag"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/slicecast/slicecast/internal/model"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
	"github.com/slicecast/slicecast/server/fanout"
)

var screenshots = flag.String("page.screenshots", "", "folder to write the screenshots of the documentation to")

// hostile is a name that does something wherever it is taken for more than text.
const hostile = `"><script>document.title='owned'</script><img src=x onerror="document.title='owned'">${alert(1)}`

// fleet returns a server with nodes, of which some are in trouble, and changes.
func fleet(nodes int) *fake {
	f := newFake(nodes)
	for i, a := range f.agents {
		switch {
		case i%997 == 5:
			behind(a, 20*time.Minute)
		case i%401 == 7:
			behind(a, 2*time.Minute)
		case i%203 == 11:
			behind(a, 25*time.Second)
		case i%151 == 3:
			behind(a, 7*time.Second)
		case i%307 == 9:
			a.Synced, a.Programmed, a.Nodes = false, false, 0
		case i%499 == 13:
			a.Errors = []*pb.AgentError{{Object: "Service default/web", Reason: "no such table", Time: a.GetSince()}}
		case i%601 == 17:
			a.Warnings = []*pb.AgentWarning{{Warning: pb.NodeWarning_NODE_WARNING_KUBE_PROXY, Reason: "a kube-proxy runs here", Time: a.GetSince()}}
		}
	}
	relay := client("")
	relay.Kind, relay.Nodes, relay.Address = pb.ClientKind_CLIENT_KIND_RELAY, 250, "10.180.3.7:40112"
	f.agents = append(f.agents, relay)
	f.open, f.lacking = 1, make(map[string]bool)
	for _, a := range f.agents {
		if a.GetLag() != nil {
			f.lacking[a.GetNodeName()] = true
		}
	}
	names := []string{"web", "checkout", "search", "payments", "cart"}
	for i := range 12 {
		c := fanout.Convergence{
			Shard: uint32(7*i) % 64, Sequence: uint64(4000 - 31*i), Published: time.Now().Add(-time.Duration(5+9*i) * time.Second),
			Nodes: nodes, Programmed: nodes,
			Times: [3]time.Duration{
				time.Duration(18+i) * time.Millisecond, time.Duration(74+3*i) * time.Millisecond, time.Duration(240+50*i) * time.Millisecond,
			},
			Last: []fanout.NodeTime{{Node: "node-00042", Time: time.Duration(240+50*i) * time.Millisecond}},
		}
		c.Changed.Services = []model.ServiceKey{{Namespace: "shop", Name: names[i%len(names)]}}
		if i == 3 {
			c.Programmed, c.Times[2] = nodes-len(f.lacking), 0
			c.Last = []fanout.NodeTime{{Node: "node-00005"}, {Node: "node-00007"}}
		}
		f.changes = append(f.changes, c)
	}
	f.service = &pb.GetServiceResponse{
		Shard: f.changes[3].Shard, ChangedSequence: f.changes[3].Sequence,
		Service: &pb.Service{
			Namespace: "shop", Name: "payments", ClusterIps: []string{"10.96.12.7"}, Type: pb.ServiceType_SERVICE_TYPE_CLUSTER_IP,
			Ports: []*pb.ServicePort{{Name: "https", Port: 443, Protocol: pb.Protocol_PROTOCOL_TCP}},
		},
		Slices: []*pb.Slice{{Endpoints: []*pb.Endpoint{{Ready: true}, {Ready: true}, {}}}},
	}
	return f
}

// Steps implements Server with a curve that ends with the times of the change.
func (f *fleetServer) Steps(shard uint32, sequence uint64) (out []fanout.Step) {
	for _, c := range f.Convergences() {
		if c.Shard != shard || c.Sequence != sequence {
			continue
		}
		for i := 1; i <= 80; i++ {
			t := c.Times[0]/2 + c.Times[0]*time.Duration(i*i)/2000
			out = append(out, fanout.Step{Time: t, Nodes: c.Programmed * 97 * i / 8000})
		}
		out = append(out, fanout.Step{Time: c.Times[1] + c.Times[0], Nodes: c.Programmed * 99 / 100},
			fanout.Step{Time: max(c.Times[2], c.Times[1]+2*c.Times[0]), Nodes: c.Programmed})
	}
	return out
}

// fleetServer is a server whose changes have curves.
type fleetServer struct{ *fake }

// TestPage walks through the page in a browser.
func TestPage(t *testing.T) {
	b := startBrowser(t)
	b.open(serve(t, &fleetServer{fleet(10000)}, nil, nil).url+Path, "light")
	b.until("performance.getEntriesByName('drawn').length")
	drawn := b.eval("performance.getEntriesByName('drawn')[0].startTime")
	t.Logf("10,000 nodes are drawn %.0f ms after the navigation", drawn)
	if *screenshots != "" { // other tests run beside this one otherwise
		require.Less(t, drawn, 1000.0, "milliseconds")
	}
	// Fewer nodes let a slow machine take more samples.
	f := fleet(2000)
	s := serve(t, &fleetServer{f}, nil, func(p *Page) { p.interval = 200 * time.Millisecond })
	b.open(s.url+Path, "light")
	b.until("performance.getEntriesByName('drawn').length")
	b.heatMap()
	b.names()
	b.liveUpdate(f)
	b.details()
	b.service()
	b.change()
	b.hostileNames(f)
	b.requireNoProblems()
	if *screenshots != "" {
		b.pictures(serve(t, &fleetServer{fleet(2000)}, nil, nil).url)
		b.open(s.url+Path, "light")
		b.until("performance.getEntriesByName('drawn').length")
	}
	close(s.draining)
	b.until(`document.getElementById("connection").textContent.includes("the server is about to stop")`)
}

// heatMap checks the squares by mouse: their colors, and what they say.
func (b *browser) heatMap() {
	b.t.Helper()
	require.Equal(b.t, "slicecast-server-0", b.text("name"))
	require.Contains(b.t, b.text("about"), "10,000 Services, 12,000 slices, 250,000 endpoints")
	require.Contains(b.t, b.text("summary"), "1 change not on all nodes yet")
	var box struct{ Left, Top float64 }
	b.decode(`(({left, top}) => ({left, top}))(document.getElementById("map").getBoundingClientRect())`, &box)
	tip := func(x float64) string {
		b.call("Input.dispatchMouseEvent", object{"type": "mouseMoved", "x": box.Left + x, "y": box.Top + 1}, nil)
		return b.text("tip")
	}
	var pixels [][]float64
	b.decode(`(() => {
		const line = [...document.getElementById("map").getContext("2d").getImageData(0, 1, 100, 1).data];
		return Array.from({ length: 100 }, (_, x) => line.slice(4 * x, 4 * x + 3));
	})()`, &pixels)
	colors := make(map[string][]float64)
	for x := 1.0; x < 100; x++ {
		name, _, _ := strings.Cut(tip(x), ": ")
		if _, ok := colors[name]; !ok {
			colors[name] = pixels[int(x)]
		}
		if name == "node-00005" {
			require.Contains(b.t, b.text("tip"), "node-00005: 20 min")
			for _, kind := range []string{"mousePressed", "mouseReleased"} {
				b.call("Input.dispatchMouseEvent", object{"type": kind, "x": box.Left + x, "y": box.Top + 1, "button": "left", "clickCount": 1}, nil)
			}
			b.until(`document.getElementById("detail-facts").textContent.includes("192.0.2.1:1234")`)
			require.Equal(b.t, "node-00005", b.text("detail-title"))
			break
		}
	}
	require.Equal(b.t, []float64{63, 156, 140}, colors["node-00000"])
	require.Equal(b.t, []float64{255, 197, 61}, colors["node-00003"], "7 s behind")
	b.eval(`document.getElementById("detail-close").click()`)
	b.eval(`document.activeElement.blur()`)
}

// names checks what a screen reader has of the page.
func (b *browser) names() {
	b.t.Helper()
	require.Equal(b.t, "47 nodes in trouble", b.text("said"))
	// The browser computes the tree again after changes, and not at once.
	for _, want := range []string{
		"heading: Slicecast slicecast-server-0", "heading: Nodes of this server", "heading: List",
		"heading: Way of a Service or change to the nodes", "heading: Latest changes", "link: Skip to the list of nodes",
		"image: Heat map of the nodes: 2,001 nodes. ", "searchbox: Name contains", "combobox: Show", "combobox: Service",
		"button: Follow", "button: Pause", "button: Previous", "button: Next", "button: node-00512", "columnheader: Lag", "rowheader: node-00512",
		"image: Curves of the latest 12 changes; 1 not on all nodes yet.", "button: shop/payments", "button: over 10 min ",
	} {
		require.Eventually(b.t, func() bool { return strings.Contains(b.accessible(), want) }, patience, 10*time.Millisecond, want)
	}
	unnamed := b.eval(`[...document.querySelectorAll("button, input, select, canvas[role], svg, progress, table")]
		.filter((e) => !e.closest("[hidden]") && !e.textContent.trim() && !e.labels?.length && !e.getAttribute("aria-label")).map((e) => e.outerHTML)`)
	require.Empty(b.t, unnamed)
}

// liveUpdate checks that a node that falls behind comes to the top of the list by itself.
func (b *browser) liveUpdate(f *fake) {
	b.t.Helper()
	const first = `document.querySelector("#rows button").textContent`
	require.NotEqual(b.t, "node-01700", b.eval(first))
	f.set(func() {
		f.agents[1700] = behind(client("node-01700"), 3*time.Hour)
		f.agents[1700].Errors = []*pb.AgentError{{Object: "Service shop/cart", Reason: "no space left", Time: f.agents[1700].GetSince()}}
	})
	b.until(first + ` === "node-01700"`)
	require.Contains(b.t, b.eval(`document.querySelector("#rows tr").textContent`), "behind3 h 0 min1")
	// While the list has the focus, nothing in it moves.
	b.eval(`document.querySelector("#rows button").focus()`)
	f.set(func() {
		f.agents[1700] = client("node-01700")
		f.agents[1701] = behind(client("node-01701"), 4*time.Hour)
		f.agents[1701].Errors = []*pb.AgentError{{Object: "Service shop/cart"}}
	})
	b.until(`document.querySelector("#rows tr").textContent.includes("up to date")`)
	require.Equal(b.t, "node-01700", b.focused())
	b.eval(`document.activeElement.blur()`)
	b.until(first + ` === "node-01701"`)
}

// details walks to a node's details and back with the keyboard alone.
func (b *browser) details() {
	b.t.Helper()
	b.eval(`document.getElementById("pause").focus()`)
	for range 12 {
		if b.press("Tab"); b.focused() == "map" {
			break
		}
	}
	require.Equal(b.t, "map", b.focused())
	b.press("Home", "ArrowRight", "ArrowRight", "ArrowLeft")
	require.Equal(b.t, "node-00001: up to date", b.text("announce"))
	b.press("End")
	require.Contains(b.t, b.text("announce"), "relay 10.180.3.7:40112: relay of 250 nodes")
	b.eval(`document.querySelector(".skip").focus()`)
	b.press("Enter", "Tab", "Tab", "Tab")
	require.Equal(b.t, "node-01701", b.focused(), "search, filter, and then the list as one stop")
	b.press("ArrowDown")
	second := b.focused()
	require.Equal(b.t, "node-00013", second, "a node with errors comes next")
	b.press("Enter")
	require.Equal(b.t, "detail-title", b.focused())
	require.Equal(b.t, second, b.text("detail-title"))
	b.until(`document.getElementById("detail-problems").textContent.includes("no such table")`)
	b.press("Tab", "Enter")
	require.Equal(b.t, second, b.focused())
	require.True(b.t, b.eval(`document.getElementById("detail").hidden`).(bool))
}

// service follows a Service to the nodes that lack it.
func (b *browser) service() {
	b.t.Helper()
	b.eval(`document.getElementById("way-service").focus()`)
	b.write("shop")
	b.press("Enter")
	b.until(`!document.getElementById("way-problem").hidden`)
	require.Equal(b.t, "Write the Service as namespace/name.", b.text("way-problem"))
	b.write("/other")
	b.press("Enter")
	b.until(`document.getElementById("way-problem").textContent.includes("this server has no Service shop/other")`)
	b.eval(`document.getElementById("way-service").value = ""`)
	b.write("shop/payments")
	b.press("Enter")
	b.until(`document.getElementById("way-state").textContent.includes("lack it")`)
	require.Contains(b.t, b.text("way-about"), "10.96.12.7 · https 443/TCP · 3 endpoints, 2 ready, in 1 slice")
	require.Equal(b.t, "way-name", b.focused())
	require.Equal(b.t, "lacking", b.eval(`document.getElementById("show").value`))
	require.Contains(b.t, b.text("nodes-caption"), fmt.Sprintf("1 to 15 of %d: nodes that lack what is followed", 32))
}

// change follows a change from the table.
func (b *browser) change() {
	b.t.Helper()
	b.eval(`document.activeElement.blur()`)
	require.InDelta(b.t, 1, b.eval(`document.querySelectorAll("#curves .chosen").length`), 0, "the Service's latest change is among them")
	b.eval(`document.querySelectorAll("#change-rows button")[3].click()`)
	b.until(`document.getElementById("way-name").textContent === "Change of shop/payments"`)
	b.until(`document.getElementById("way-progress").value > 1900`)
	b.eval(`document.getElementById("way-stop").click()`)
	require.Equal(b.t, "all", b.eval(`document.getElementById("show").value`))
}

// hostileNames checks names of nodes and Services that would do something if they were not text.
func (b *browser) hostileNames(f *fake) {
	b.t.Helper()
	f.set(func() {
		worst := behind(client(hostile), 30*time.Hour)
		worst.ClientVersion, worst.Programmer = hostile, hostile
		worst.Errors = []*pb.AgentError{{Object: hostile, Reason: hostile + "\u202e", Time: worst.GetSince()}}
		worst.Warnings = []*pb.AgentWarning{{Reason: hostile, Warning: pb.NodeWarning_NODE_WARNING_KUBE_PROXY, NodeName: hostile}}
		f.agents[0] = worst
		changes := slices.Clone(f.changes)
		changes[0].Changed.Services = []model.ServiceKey{{Namespace: hostile, Name: hostile}}
		changes[0].Last = []fanout.NodeTime{{Node: hostile}}
		f.changes = changes
	})
	name, err := json.Marshal(hostile)
	require.NoError(b.t, err)
	b.until(fmt.Sprintf(`document.querySelector("#rows button").textContent === %s`, name))
	b.eval(`document.querySelector("#rows button").click()`)
	b.until(fmt.Sprintf(`document.getElementById("detail-problems").textContent.includes(%s)`, name))
	b.until(fmt.Sprintf(`document.querySelector("#change-rows").textContent.includes(%s)`, name))
	b.eval(`document.querySelector("#change-rows button").click()`)
	b.until(fmt.Sprintf(`document.getElementById("way-name").textContent.includes(%s)`, name))
	require.Contains(b.t, b.eval("document.title"), "Slicecast")
	require.InDelta(b.t, 1, b.eval(`document.scripts.length + document.images.length`), 0)
}

// pictures makes the pictures of the documentation.
func (b *browser) pictures(url string) {
	b.t.Helper()
	for _, scheme := range []string{"light", "dark"} {
		b.open(url+Path, scheme)
		b.until("performance.getEntriesByName('drawn').length")
		if scheme == "dark" {
			b.eval(`document.getElementById("way-service").value = "shop/payments"`)
			b.eval(`document.querySelector("#way-form button").click()`)
			b.until(`document.getElementById("way-state").textContent.includes("lack it")`)
			b.eval(`document.activeElement.blur()`)
		}
		b.screenshot(filepath.Join(*screenshots, "page-"+scheme+".png"), 1000)
	}
}
