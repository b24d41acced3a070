// Package inspect reads what a bug report needs from an agent's node: the rules of all programs,
// facts of the kernel, and the pages of the running agent. It changes nothing, and needs no more
// capabilities than the agent has. Every part has a bound, and a part that cannot be read does not
// stop the others.
package inspect

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/slicecast/slicecast/agent/netlink"
	"github.com/slicecast/slicecast/agent/nft"
	"github.com/slicecast/slicecast/internal/daemon"
)

const (
	// maxPart and maxParts bound the content of one part and of all parts together, in bytes.
	maxPart, maxParts = 4 << 20, 24 << 20
	// partTime bounds the time of one part.
	partTime = 20 * time.Second
)

// Options configures what is read.
type Options struct {
	// Address is the address (host:port) of the agent's pages. Empty means that it has none. Pages
	// are the names of those that it serves there, if it has an address.
	Address string
	Pages   []string
	// SecureMetrics is the address of the agent's metrics over TLS. Empty means that it has none.
	SecureMetrics string
	// Settings are the agent's settings, which are printed as JSON if the agent does not serve them.
	Settings any
	// Unknown is why nothing of the above is known; nil if it is known.
	Unknown error
}

// Part is a part of what was read. Parts are printed as JSON, one a line.
type Part struct {
	// Name is a path that says what it is, such as kernel/sysctls.txt.
	Name string `json:"name"`
	// Content is valid UTF-8. Truncated means that there was more.
	Content   string `json:"content,omitempty"`
	Truncated bool   `json:"truncated,omitempty"`
	// Error is why the part, or the rest of it, could not be read.
	Error string `json:"error,omitempty"`
}

// source reads one part.
type source struct {
	name string
	read func(ctx context.Context, out io.Writer) error
}

// Write reads all parts and writes them to out, each as soon as it is read.
func Write(ctx context.Context, o Options, out io.Writer) error {
	left := maxParts
	encoder := json.NewEncoder(out)
	for _, s := range sources(o) {
		p := s.part(ctx, min(maxPart, left))
		left -= len(p.Content)
		if err := encoder.Encode(p); err != nil {
			return fmt.Errorf("print %s: %w", s.name, err)
		}
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
	}
	return nil
}

// errFull means that a part has reached its bound.
var errFull = errors.New("full")

// bounded is a buffer with a bound. The buffer is no embedded field, whose ReadFrom and WriteString
// would pass by the bound.
type bounded struct {
	buffer bytes.Buffer
	limit  int
}

// Write implements io.Writer.
func (b *bounded) Write(p []byte) (int, error) {
	if room := b.limit - b.buffer.Len(); len(p) > room {
		n, _ := b.buffer.Write(p[:max(room, 0)])
		return n, errFull
	}
	return b.buffer.Write(p)
}

func (s source) part(ctx context.Context, limit int) Part {
	ctx, cancel := context.WithTimeoutCause(ctx, partTime, fmt.Errorf("not read within %v", partTime))
	defer cancel()
	content := &bounded{limit: limit}
	err := s.read(ctx, content)
	p := Part{Name: s.name, Content: strings.ToValidUTF8(content.buffer.String(), "\uFFFD")}
	switch {
	case errors.Is(err, errFull):
		p.Truncated = true
	case err != nil && ctx.Err() != nil:
		p.Error = context.Cause(ctx).Error()
	case err != nil:
		p.Error = err.Error()
	}
	return p
}

func sources(o Options) []source {
	out := []source{
		{"kernel/version.txt", version},
		{"kernel/modules.txt", files("/proc/modules")},
		{"kernel/sysctls.txt", files(sysctls...)},
		{"kernel/conntrack.txt", files("/proc/net/stat/nf_conntrack", "/proc/sys/net/netfilter/nf_conntrack_*")},
		{"kernel/addresses.txt", addresses},
		{"rules/nftables.txt", nftables},
		{"rules/ipvs.txt", files("/proc/net/ip_vs", "/proc/net/ip_vs_stats")},
	}
	for _, command := range saveCommands {
		out = append(out, source{"rules/" + command + ".txt", run(command)})
	}
	return append(out, o.agent()...)
}

// settingsPage is the name of the page that has the agent's settings.
const settingsPage = "configz"

// agent returns the sources of what the running agent says. Pages that it is not meant to serve are
// no errors.
func (o Options) agent() (out []source) {
	part := func(page string) string { return "agent/" + page + ".txt" }
	if o.Unknown != nil {
		return []source{{part(settingsPage), func(context.Context, io.Writer) error { return o.Unknown }}}
	}
	var absent []string
	for _, name := range []string{"metrics", settingsPage, "flagz", "statusz", "proxyMode", "healthz"} {
		switch {
		case o.Address != "" && slices.Contains(o.Pages, name):
			out = append(out, source{part(name), page(o.Address, name)})
			continue
		case name == settingsPage:
			out = append(out, source{part(name), o.settings})
		}
		absent = append(absent, name)
	}
	if len(absent) > 0 {
		out = append(out, source{part("not-served"), func(_ context.Context, out io.Writer) error { return o.notServed(absent, out) }})
	}
	return out
}

// settings prints the settings.
func (o Options) settings(_ context.Context, out io.Writer) error {
	text, err := json.MarshalIndent(o.Settings, "", "  ")
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s\n", text)
	return err
}

// notServed says why pages are not served.
func (o Options) notServed(absent []string, out io.Writer) error {
	why := "--pages does not contain them"
	if o.Address == "" {
		why = "--metrics-bind-address is empty, or it is left to kube-proxy or to what else programs the node, as beside " +
			"kube-proxy and with --programmer=shadow"
	}
	text := fmt.Sprintf("By its settings, the agent does not serve %s: %s.\n", strings.Join(absent, ", "), why)
	if slices.Contains(absent, settingsPage) {
		text += fmt.Sprintf("%s is what its command line and configuration file say now.\n", settingsPage)
	}
	if slices.Contains(absent, "metrics") && o.SecureMetrics != "" {
		text += fmt.Sprintf("It serves metrics over TLS at %s, to clients with credentials.\n", o.SecureMetrics)
	}
	_, err := io.WriteString(out, text)
	return err
}

// sysctls are the settings of the kernel that matter to Services. None of them is a secret, as
// net.ipv4.tcp_fastopen_key would be.
var sysctls = []string{
	"/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/ip_local_port_range", "/proc/sys/net/ipv4/ip_local_reserved_ports",
	"/proc/sys/net/ipv4/conf/*/forwarding", "/proc/sys/net/ipv4/conf/*/route_localnet", "/proc/sys/net/ipv4/conf/*/rp_filter",
	"/proc/sys/net/ipv4/conf/*/arp_ignore", "/proc/sys/net/ipv4/conf/*/arp_announce", "/proc/sys/net/ipv4/vs/*",
	"/proc/sys/net/ipv6/conf/*/forwarding", "/proc/sys/net/ipv6/conf/*/disable_ipv6", "/proc/sys/net/bridge/*",
	"/proc/sys/net/netfilter/*",
}

// saveCommands print the rules of iptables in the order in which packets meet them. They are in the
// image of the agent that can program iptables.
var saveCommands = []string{
	"iptables-nft-save", "ip6tables-nft-save", "iptables-legacy-save", "ip6tables-legacy-save", "iptables-save", "ip6tables-save",
}

func version(_ context.Context, out io.Writer) error {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return fmt.Errorf("uname: %w", err)
	}
	text := unix.ByteSliceToString
	_, err := fmt.Fprintf(out, "%s %s %s %s\n", text(name.Sysname[:]), text(name.Release[:]), text(name.Version[:]), text(name.Machine[:]))
	return err
}

// files returns a function that prints files, by patterns. Files that do not exist are left out.
func files(patterns ...string) func(context.Context, io.Writer) error {
	return func(ctx context.Context, out io.Writer) error {
		var failed error
		for _, pattern := range patterns {
			paths, err := filepath.Glob(pattern)
			if err != nil {
				return err
			}
			for _, path := range paths {
				if ctx.Err() != nil {
					return context.Cause(ctx)
				}
				err := printFile(path, out)
				if errors.Is(err, errFull) {
					return err
				}
				failed = cmp.Or(failed, err)
			}
		}
		return failed
	}
}

// printFile prints a file. If it has one line, its name is before it.
func printFile(path string, out io.Writer) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || info.IsDir() {
		return err
	}
	content, err := io.ReadAll(io.LimitReader(f, maxPart+1))
	if err != nil {
		return err
	}
	format := "%s: %s"
	if bytes.Count(content, []byte("\n")) > 1 {
		format = "%s:\n%s"
	}
	_, err = fmt.Fprintf(out, format, path, content)
	return err
}

func addresses(_ context.Context, out io.Writer) error {
	links, err := netlink.Links()
	if err != nil {
		return err
	}
	all, err := netlink.Addresses()
	if err != nil {
		return err
	}
	held := map[int][]netip.Prefix{}
	for _, a := range all {
		held[a.Link] = append(held[a.Link], a.Prefix)
	}
	for _, l := range links {
		if _, err := fmt.Fprintf(out, "%s mtu %d %v %v\n", l.Name, l.MTU, l.Flags, held[l.Index]); err != nil {
			return err
		}
	}
	return nil
}

// nftables prints the ruleset with the command nft, if there is one, and otherwise as the kernel
// holds it.
func nftables(ctx context.Context, out io.Writer) error {
	if _, err := exec.LookPath("nft"); err == nil {
		return run("nft", "--stateless", "list", "ruleset")(ctx, out)
	}
	return nft.Dump(out)
}

// run returns a function that runs a command. A command that is not installed is no error, because
// then no agent of this image has made rules with it.
func run(name string, args ...string) func(context.Context, io.Writer) error {
	return func(ctx context.Context, out io.Writer) error {
		if _, err := exec.LookPath(name); err != nil {
			_, err := fmt.Fprintf(out, "The command %s is not in this image.\n", name)
			return err
		}
		command := exec.CommandContext(ctx, name, args...)
		command.WaitDelay = time.Second
		problems := &bounded{limit: 4 << 10}
		command.Stdout, command.Stderr = out, problems
		err := command.Run()
		if full, ok := out.(*bounded); ok && full.buffer.Len() >= full.limit {
			return errFull
		}
		if err != nil {
			return fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(problems.buffer.String()))
		}
		return nil
	}
}

// page returns a function that prints a page of the agent.
func page(address, name string) func(context.Context, io.Writer) error {
	return func(ctx context.Context, out io.Writer) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/"+name, http.NoBody)
		if err != nil {
			return err
		}
		// Unlike the default, this uses no proxy of the environment.
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		answer, err := client.Do(request)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		if server := answer.Header.Get("Server"); server != daemon.AgentServer {
			return fmt.Errorf("another program answers at %s: is it kube-proxy", address)
		}
		if name != "healthz" && answer.StatusCode != http.StatusOK {
			return fmt.Errorf("http://%s/%s: %s", address, name, answer.Status)
		}
		_, err = io.Copy(out, answer.Body)
		return err
	}
}
