// Package plugin implements kubectl slicecast, which asks all servers and relays of a cluster and
// merges their answers.
//
// Each command asks all servers. A server that does not answer is named in the output, and in the
// exit code. A server only knows its own clients, so answers about nodes are merged: a node has one
// agent, whose newest stream counts. A relay stands for its nodes at the server that feeds it; if
// the relay itself answers, its answer replaces that.
package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/slicecast/slicecast/internal/daemon"
	"github.com/slicecast/slicecast/internal/plugin/fleet"
	"github.com/slicecast/slicecast/internal/show"
	"github.com/slicecast/slicecast/internal/source/kube"
)

// These are the exit codes. The last one that applies counts.
const (
	fine = iota
	// wrong means that something is behind or wrong, which the output names.
	wrong
	// incomplete means that not everything could be asked, or nothing at all.
	incomplete
)

// completionTimeout is how long the shell may wait for names.
const completionTimeout = 3 * time.Second

// exitError is an error that the output has shown already.
type exitError int

// Error implements error.
func (c exitError) Error() string { return fmt.Sprintf("exit code %d", int(c)) }

// Main runs the command of this process's arguments until it ends or a signal ends it. It returns
// the exit code.
func Main() int {
	// client-go's own log would be in the middle of the output.
	kube.RouteLogs(slog.New(slog.DiscardHandler))
	var more []os.Signal
	if !signal.Ignored(syscall.SIGHUP) { // as nohup wants it
		more = append(more, syscall.SIGHUP)
	}
	ctx, stop := daemon.SignalContext(context.Background(), more...)
	defer stop()
	// If nobody reads the output any more, as after "| head", commands still remove what they have
	// created. Unlike an ignored signal, this does not change what programs that they start do.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	root := NewCommand()
	_, err := daemon.Execute(ctx, root)
	if path, ok := errors.AsType[*fs.PathError](err); ok && errors.Is(path, syscall.EPIPE) {
		return incomplete // and nobody reads why
	}
	return Code(root, err)
}

// Code prints the error of a command, unless its output has shown it, and returns the exit code.
func Code(root *cobra.Command, err error) int {
	if code, ok := errors.AsType[exitError](err); ok {
		return int(code)
	}
	if err != nil {
		// Texts of servers, registries and Pods may be part of it.
		lines := strings.Split(err.Error(), "\n")
		for i, line := range lines {
			lines[i] = show.Printable(line)
		}
		fmt.Fprintf(root.ErrOrStderr(), "%s: %s\n", root.DisplayName(), strings.Join(lines, "\n"))
		return incomplete
	}
	return fine
}

// options are the flags of all commands.
type options struct {
	kubeconfig     string
	overrides      clientcmd.ConfigOverrides
	allNamespaces  bool
	serviceAccount string
	timeout        time.Duration
	// verbosity is that of the log on standard error, as klog counts it.
	verbosity int
	log       io.Writer
}

// These are the verbosities from which on the log says who was asked, and from which on it also
// names the requests to the API server, as kubectl's does.
const askedVerbosity, requestVerbosity = 1, 6

// logger returns the log that the user wants.
func (o *options) logger() *slog.Logger {
	switch {
	case o.verbosity < askedVerbosity:
		return slog.New(slog.DiscardHandler)
	case o.verbosity < requestVerbosity:
		return slog.New(slog.NewTextHandler(o.log, nil))
	}
	return slog.New(slog.NewTextHandler(o.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// NewCommand returns the command kubectl slicecast.
func NewCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "slicecast",
		Short: "Show what the servers of Slicecast know of the nodes",
		Long: `kubectl slicecast asks all servers and relays of Slicecast in a cluster, and merges their answers. It uses your
kubeconfig and your rights: it reaches each server through a port-forward, and shows it a token that it requests for
the ServiceAccount slicecast-viewer.

Exit codes: 0 if everything was asked and nothing is wrong; 1 if something is behind or wrong; 2 if not everything could
be asked, or nothing at all.`,
		SilenceUsage:  true,
		SilenceErrors: true, // Code prints the error
	}
	if strings.HasPrefix(filepath.Base(os.Args[0]), "kubectl-") {
		root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl slicecast"}
	}
	o := &options{log: errorWriter{root}}
	daemon.AddVersion(root)
	fs := root.PersistentFlags()
	fs.StringVar(&o.kubeconfig, "kubeconfig", "", "Path to the kubeconfig file.")
	flags := clientcmd.RecommendedConfigOverrideFlags("")
	flags.ContextOverrideFlags.Namespace.Default = fleet.DefaultNamespace
	flags.ContextOverrideFlags.Namespace.Description = "Namespace of the servers and relays that are asked."
	clientcmd.BindOverrideFlags(&o.overrides, fs, flags)
	fs.BoolVarP(&o.allNamespaces, "all-namespaces", "A", false,
		"Ask the servers and relays of all namespaces. Then you trust everybody who may create Pods in one of them.")
	root.MarkFlagsMutuallyExclusive("namespace", "all-namespaces")
	fs.StringVar(&o.serviceAccount, "service-account", fleet.DefaultServiceAccount,
		"ServiceAccount in the servers' namespace whose token the servers are shown.")
	fs.IntVarP(&o.verbosity, "v", "v", 0, fmt.Sprintf("Verbosity of the log on standard error: from %d on, who was asked and how long that took; "+
		"from %d on, also the requests to the API server.", askedVerbosity, requestVerbosity))
	fs.DurationVar(&o.timeout, "timeout", 10*time.Second, "Maximum time to wait for each server.")
	root.AddCommand(newStatusCommand(o), newNodesCommand(o), newChangesCommand(o), newLacksCommand(o), newAgentCommand(o), newCheckCommand(o),
		newVerifyCommand(o), newExplainCommand(o), newConnectivityCommand(o), newPageCommand(o), newBugreportCommand(o))
	return root
}

// errorWriter writes to the standard error of a command, which tests may replace.
type errorWriter struct{ c *cobra.Command }

// Write implements io.Writer.
func (w errorWriter) Write(p []byte) (int, error) { return w.c.ErrOrStderr().Write(p) }

// fleet returns the fleet of the cluster that the flags choose. The caller must close it.
func (o *options) fleet() (*fleet.Fleet, error) {
	if o.timeout <= 0 {
		return nil, fmt.Errorf("--timeout is %v: use a positive duration", o.timeout)
	}
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = o.kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &o.overrides).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("kubeconfig: %w", err)
	}
	namespace := o.overrides.Context.Namespace
	switch {
	case o.allNamespaces:
		namespace = ""
	case namespace == "":
		return nil, errors.New("--namespace is empty: set it to the namespace of the servers, or use --all-namespaces")
	}
	return fleet.New(fleet.Options{
		Config: config, Namespace: namespace, ServiceAccount: o.serviceAccount, Timeout: o.timeout, Logger: o.logger(),
	})
}

// report is what a command prints.
type report interface {
	show.Report
	// code returns the exit code.
	code() int
}

// run asks the fleet and prints the report, with --watch again and again. Its error has the exit
// code of the last report, or that of what is incomplete if there was an error instead of it.
func (o *options) run(c *cobra.Command, out *show.Options, ask func(context.Context, *fleet.Fleet) (report, error)) error {
	if err := out.Validate(); err != nil {
		return err
	}
	f, err := o.fleet()
	if err != nil {
		return err
	}
	defer f.Close()
	// Requests for Pods and tokens come before the servers are asked, a few at a time.
	out.AskTimeout = max(out.AskTimeout, 10*o.timeout)
	code := fine
	err = out.Run(c.Context(), c.OutOrStdout(), func(ctx context.Context) (show.Report, error) {
		r, err := ask(ctx, f)
		switch {
		case err == nil:
			code = r.code()
			return r, nil
		case c.Context().Err() == nil: // otherwise the user has interrupted this
			code = incomplete
		}
		return nil, err
	})
	if err == nil && code != fine {
		err = exitError(code)
	}
	return err
}

// server is a server in the output.
type server struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Relay     bool   `json:"relay"`
	// Error is why the server was not asked, or did not answer.
	Error string `json:"error,omitempty"`
}

// servers are all servers of a fleet, with those that did not answer.
type servers []server

// ask finds the servers and asks them.
func ask[T any](
	ctx context.Context, f *fleet.Fleet, question func(context.Context, *grpc.ClientConn) (T, error),
) ([]fleet.Answer[T], servers, error) {
	found, err := f.Servers(ctx)
	if err != nil {
		return nil, nil, err
	}
	answers := fleet.Ask(ctx, f, found, question)
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	var all servers
	for _, a := range answers {
		s := server{Namespace: a.Server.Namespace, Name: a.Server.Name, Relay: a.Server.Relay}
		if a.Err != nil {
			s.Error = a.Err.Error()
		}
		all = append(all, s)
	}
	return answers, all, nil
}

// silent returns how many servers did not answer.
func (s servers) silent() (n int) {
	for _, one := range s {
		if one.Error != "" {
			n++
		}
	}
	return n
}

// code returns the exit code, where wrong says that something in the answers is.
func (s servers) code(isWrong bool) int {
	switch {
	case s.silent() > 0:
		return incomplete
	case isWrong:
		return wrong
	}
	return fine
}

// print names the servers that did not answer. It comes first, because what follows lacks what they
// would have said.
func (s servers) print(out *show.Page) {
	if s.silent() == 0 {
		return
	}
	out.Title("Not asked: %d of %s", s.silent(), show.Plural("server", len(s)))
	out.Row("SERVER", "REASON")
	for _, one := range s {
		if one.Error != "" {
			out.Row(one.Namespace+"/"+one.Name, one.Error)
		}
	}
}

// complete returns names for the shell's completion. It returns none if they cannot be found soon.
func (o *options) complete(
	c *cobra.Command, names func(context.Context, *fleet.Fleet) ([]string, error),
) ([]cobra.Completion, cobra.ShellCompDirective) {
	o.timeout = min(o.timeout, completionTimeout)
	f, err := o.fleet()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	defer f.Close()
	ctx, cancel := context.WithTimeout(c.Context(), completionTimeout)
	defer cancel()
	found, err := names(ctx, f)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return found, cobra.ShellCompDirectiveNoFileComp
}
