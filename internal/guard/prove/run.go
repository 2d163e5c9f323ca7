package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/serviceplane/serviceplane/internal/guard/gocmd"
)

// need is lines of bash that install something, in a shell that has hack/tools.sh, or a condition.
type need string

// needsRoot is a condition that nothing installs.
const needsRoot need = "root"

// prover runs proofs, one after the other, and writes what they print.
type prover struct {
	out  io.Writer
	root bool // of Linux
	// met are the needs that are there.
	met map[need]bool
}

// can reports whether a proof can run at all.
func (r *prover) can(p *proof) bool { return r.root || !slices.Contains(p.needs, needsRoot) }

// say prints something. What cannot be printed, such as to a closed pipe, does not end a proof.
func (r *prover) say(format string, args ...any) { _, _ = fmt.Fprintf(r.out, format, args...) }

// table prints rows, whose cells end in tabs.
func (r *prover) table(rows []string) {
	w := tabwriter.NewWriter(r.out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, strings.Join(rows, "\n"))
	_ = w.Flush()
}

// run runs all of them, also after one has failed, and then writes a table.
func (r *prover) run(ctx context.Context, choices []choice) error {
	var failed []string
	rows := []string{"proof\tresult\tseconds\tseeds"}
	for _, c := range choices {
		begin, verdict := time.Now(), "passed"
		r.say("\n== %s: %s\n   about %g min: %s\n", c.title, c.proves, c.minutes, c.command())
		seeds, err := r.prove(ctx, &c)
		if err != nil {
			r.say("FAILED: %s: %v\n", c.title, err)
			verdict, failed = "FAILED", append(failed, c.title)
		}
		took := time.Since(begin).Seconds()
		r.say("-- %s: %.0fs\n", c.title, took)
		if more := len(seeds) - 4; more > 0 {
			seeds = append(seeds[:4], fmt.Sprintf("and %d more, above", more))
		} else if len(seeds) == 0 {
			seeds = []string{"-"}
		}
		rows = append(rows, fmt.Sprintf("%s\t%s\t%.0f\t%s", c.title, verdict, took, strings.Join(seeds, ", ")))
	}
	r.say("\n")
	r.table(rows)
	if failed != nil {
		return fmt.Errorf("FAILED: %s", strings.Join(failed, ", "))
	}
	return nil
}

// prove meets the needs of a proof, runs its command, and returns the seeds that it printed.
func (r *prover) prove(ctx context.Context, c *choice) (seeds []string, err error) {
	if !r.can(c.proof) {
		return nil, errors.New("kernel tests make network namespaces: run this as root on Linux")
	}
	for _, n := range c.needs {
		if r.met[n] || n == needsRoot {
			continue
		}
		if _, err := r.command(ctx, "bash", "-c", "set -euo pipefail; source hack/tools.sh; "+string(n)); err != nil {
			return nil, fmt.Errorf("install what it needs, %q: %w", n, err)
		}
		r.met[n] = true
	}
	words := c.words
	if r.root {
		words = append([]string{"SERVICEPLANE_REQUIRE_KERNEL=1"}, words...)
	}
	text, err := r.test(ctx, words)
	return seedsIn(text), err
}

// test runs a command. The output of go test -json is summarized: many packages print too much.
func (r *prover) test(ctx context.Context, words []string) (text string, err error) {
	i := slices.Index(words, "test")
	if i < 0 {
		return r.command(ctx, words...)
	}
	command := exec.CommandContext(ctx, "env", slices.Insert(slices.Clone(words), i+1, "-json")...)
	events, tested := command.CombinedOutput()
	text, err = gocmd.Summary(events, r.root || os.Getenv("SERVICEPLANE_REQUIRE_KERNEL") == "1")
	r.say("%s", text)
	return text, errors.Join(tested, err)
}

// command runs a program, after settings, and returns what it prints.
func (r *prover) command(ctx context.Context, words ...string) (string, error) {
	var text bytes.Buffer
	command := exec.CommandContext(ctx, "env", words...)
	command.Stdout = io.MultiWriter(r.out, &text)
	command.Stderr = command.Stdout
	err := command.Run()
	return text.String(), err
}

// command returns what runs a form by hand.
func (f *form) command() string {
	words := slices.Clone(f.words)
	for i, word := range words {
		if strings.ContainsAny(word, "^$|()/*? ") && !strings.HasPrefix(word, "./") && !strings.HasPrefix(word, "hack/") {
			words[i] = "'" + word + "'"
		}
	}
	return strings.Join(words, " ")
}

var seedNumber = regexp.MustCompile(`(?i)seeds?(?: from)?[ =:]+(\d+)`) // read-only

// seedsIn returns the seeds that a text names, each once.
func seedsIn(text string) (seeds []string) {
	for _, m := range seedNumber.FindAllStringSubmatch(text, -1) {
		if !slices.Contains(seeds, m[1]) {
			seeds = append(seeds, m[1])
		}
	}
	return seeds
}
