package nodeproxy

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/serviceplane/serviceplane/internal/guard/documents"
	"github.com/serviceplane/serviceplane/node/metrics"
	"github.com/serviceplane/serviceplane/node/nodeproxy/spctl"
)

var (
	flagName   = regexp.MustCompile(`--[a-z][a-z0-9-]*[a-z0-9]\b`)               // read-only
	metricName = regexp.MustCompile(`\b(?:serviceplane|kubeproxy)_[a-z_]+[a-z]`) // read-only
)

// TestFlagsAndMetrics: docs/REFERENCE.md names every flag of nodeproxy and every metric.
// Documents name no flags but those and spctl's, except in rows that say "not there" or "no effect".
func TestFlagsAndMetrics(t *testing.T) {
	t.Parallel()
	exist := flagsOf(New(Options{}))
	for _, mode := range []string{"nftables", "iptables", "ipvs", "ebpf", "userspace"} {
		registry := prometheus.NewRegistry()
		if _, err := metrics.New(recorder{registry, &exist}, metrics.Options{Mode: mode, PerService: true}); err != nil {
			t.Fatal(err)
		}
	}
	texts := documents.Read(t, "../..", ".md")
	for _, name := range exist {
		if !strings.Contains(texts["docs/REFERENCE.md"], name) {
			t.Errorf("docs/REFERENCE.md does not name %s", name)
		}
	}
	exist = append(exist, flagsOf(spctl.New(spctl.Options{}))...)
	for name, text := range texts {
		for _, flag := range regexp.MustCompile("`("+flagName.String()+")[^`]*`").FindAllStringSubmatch(text, -1) {
			if name != "CHANGELOG.md" && !slices.Contains(exist, flag[1]) && !regexp.MustCompile(`(?m)^\|.*`+flag[1]+`.*\| (?:not there|no effect)`).MatchString(texts["docs/REFERENCE.md"]) {
				t.Errorf("%s: nodeproxy and spctl have no flag %s", name, flag[1])
			}
		}
	}
}

// flagsOf returns the flags of a command and its subcommands.
func flagsOf(c *cobra.Command) (flags []string) {
	note := func(f *pflag.Flag) { flags = append(flags, "--"+f.Name) }
	c.Flags().VisitAll(note)
	c.PersistentFlags().VisitAll(note)
	for _, sub := range c.Commands() {
		flags = append(flags, flagsOf(sub)...)
	}
	return flags
}

// recorder notes the names of metrics.
type recorder struct {
	*prometheus.Registry
	names *[]string
}

func (r recorder) Register(c prometheus.Collector) error {
	descs := make(chan *prometheus.Desc, 1000)
	c.Describe(descs)
	close(descs)
	for d := range descs {
		*r.names = append(*r.names, metricName.FindString(d.String()))
	}
	return nil
}
