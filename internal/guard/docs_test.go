package guard

import (
	"io/fs"
	"os"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/serviceplane/serviceplane/metrics"
	"github.com/serviceplane/serviceplane/spctl"
)

const root = "../.."

// texts returns the files of the repository with a suffix, by path.
func texts(t *testing.T, suffix string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := fs.WalkDir(os.DirFS(root), ".", func(name string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(name, suffix) && !strings.Contains(name, "testdata/") {
			var text []byte
			text, err = os.ReadFile(path.Join(root, name))
			all[name] = string(text)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

var (
	fenced      = regexp.MustCompile("(?ms)^ *```([a-z]*)\n(.*?)^ *```$")         // read-only
	codeSpan    = regexp.MustCompile("`[^`\n]+`")                                 // read-only
	link        = regexp.MustCompile(`\]\(([^)\s#]*)#?([^)\s]*)\)`)               // read-only
	heading     = regexp.MustCompile(`(?m)^#+ (.*)$`)                             // read-only
	notInASlug  = regexp.MustCompile(`\]\([^)]*\)|[^\p{L}\p{M}\p{N}\p{Pc} -]`)    // read-only
	indentation = regexp.MustCompile(`(?m)^[\t ]+`)                               // read-only
	flagName    = regexp.MustCompile(`--[a-z][a-z0-9-]*[a-z0-9]\b`)               // read-only
	metricName  = regexp.MustCompile(`\b(?:serviceplane|kubeproxy)_[a-z_]+[a-z]`) // read-only
)

// TestLinks: links between documents lead to a file, and to a title where they have an
// anchor. A link leads to every document.
func TestLinks(t *testing.T) {
	t.Parallel()
	documents := texts(t, ".md")
	linked := []string{"README.md"}
	for name, text := range documents {
		for _, m := range link.FindAllStringSubmatch(codeSpan.ReplaceAllString(fenced.ReplaceAllString(text, ""), "x"), -1) {
			if strings.HasPrefix(m[1], "https://") {
				continue
			}
			target := path.Join(path.Dir(name), m[1])
			if m[1] == "" {
				target = name
			}
			info, err := os.Stat(path.Join(root, target))
			if err != nil {
				t.Errorf("%s links to %s: %v", name, m[1], err)
				continue
			}
			if info.IsDir() {
				target = path.Join(target, "README.md")
			}
			linked = append(linked, target)
			if m[2] != "" && !slices.Contains(slugs(documents[target]), m[2]) {
				t.Errorf("%s links to #%s, which is no title of %s", name, m[2], target)
			}
		}
	}
	for name := range documents {
		if !slices.Contains(linked, name) {
			t.Errorf("no document links to %s", name)
		}
	}
}

// slugs are the anchors that GitHub gives to the titles of a document.
func slugs(text string) (all []string) {
	for _, m := range heading.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
		all = append(all, strings.ReplaceAll(notInASlug.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-"))
	}
	return all
}

// unindent removes the indentation, which documents have less of.
func unindent(code string) string { return indentation.ReplaceAllString("\n"+code, "") }

// TestGoSnippets: the lines of Go in a document are lines of a file that is compiled.
// "// …" stands for lines left out.
func TestGoSnippets(t *testing.T) {
	t.Parallel()
	var code strings.Builder
	for _, text := range texts(t, ".go") {
		code.WriteString(unindent(text))
	}
	for name, text := range texts(t, ".md") {
		for _, block := range fenced.FindAllStringSubmatch(text, -1) {
			for piece := range strings.SplitSeq(unindent(block[2]), "\n// …\n") {
				if block[1] == "go" && !strings.Contains(code.String(), strings.Trim(piece, "\n")) {
					t.Errorf("%s: no Go file has these lines:\n%s", name, piece)
				}
			}
		}
	}
}

// TestFlagsAndMetrics: docs/MIGRATING.md names every flag of nodeproxy and every metric.
// Documents name no flags but those and spctl's, except in rows that say "not there" or "no effect".
func TestFlagsAndMetrics(t *testing.T) {
	t.Parallel()
	command := exec.CommandContext(t.Context(), "go", "run", "./examples/nodeproxy", "--help")
	command.Dir = root
	help, err := command.CombinedOutput()
	if err != nil {
		t.Fatalf("nodeproxy --help: %v\n%s", err, help)
	}
	exist := flagName.FindAllString(string(help), -1)
	for _, mode := range []string{"nftables", "iptables", "ipvs", "ebpf", "userspace"} {
		registry := prometheus.NewRegistry()
		if _, err := metrics.New(recorder{registry, &exist}, metrics.Options{Mode: mode, PerService: true}); err != nil {
			t.Fatal(err)
		}
	}
	documents := texts(t, ".md")
	for _, name := range exist {
		if !strings.Contains(documents["docs/MIGRATING.md"], name) {
			t.Errorf("docs/MIGRATING.md does not name %s", name)
		}
	}
	exist = append(exist, flagsOf(spctl.New(spctl.Options{}))...)
	for name, text := range documents {
		for _, flag := range regexp.MustCompile("`("+flagName.String()+")[^`]*`").FindAllStringSubmatch(text, -1) {
			if name != "CHANGELOG.md" && !slices.Contains(exist, flag[1]) && !regexp.MustCompile(`(?m)^\|.*`+flag[1]+`.*\| (?:not there|no effect)`).MatchString(documents["docs/MIGRATING.md"]) {
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

// Commands of tests, and flags with which go test still answers from its cache: see "go help test".
var (
	testCommand = regexp.MustCompile("go test [^`#&;\n]*")                            // read-only
	testFlag    = regexp.MustCompile(`\s--?([a-z.]+)`)                                // read-only
	cachedFlags = regexp.MustCompile(`^(v|run|skip|timeout|short|race|tags|exec|p)$`) // read-only
)

// TestCommandsRunTheTests: a command that a document gives runs the tests. From the cache of go test it would print
// the seeds of the time before, and what another kernel did.
func TestCommandsRunTheTests(t *testing.T) {
	t.Parallel()
	for name, text := range texts(t, ".md") {
		for _, command := range testCommand.FindAllString(text, -1) {
			flags := testFlag.FindAllStringSubmatch(command, -1)
			if !slices.ContainsFunc(flags, func(m []string) bool { return !cachedFlags.MatchString(m[1]) }) {
				t.Errorf("%s: the cache may answer %q, want -count=1 in it", name, command)
			}
		}
	}
}
