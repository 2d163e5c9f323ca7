// Command promise judges what apidiff says of the exported API against
// CHANGELOG.md, by the rules of docs/STABILITY.md: what breaks programs is named
// under "### Breaking" with the way over, a package with new API is named under
// "### New API", and the sections of the changelog are in order.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
)

// question is what the command line asks.
type question struct {
	changelog string            // a file
	module    string            // whose reports these are
	root      string            // its directory
	since     string            // the last release before the changes, if there was one
	release   string            // the release that is judged, if it is one
	stale     bool              // complain of entries about what did not change
	reports   map[string]string // files with what apidiff printed, by system
}

func main() {
	q, err := parseArguments(os.Args[1:])
	if err == nil {
		err = run(q, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func parseArguments(args []string) (question, error) {
	q := question{reports: map[string]string{}}
	flags := flag.NewFlagSet("promise", flag.ContinueOnError)
	flags.StringVar(&q.changelog, "changelog", "CHANGELOG.md", "the changelog")
	flags.StringVar(&q.module, "module", "", "path of the module")
	flags.StringVar(&q.root, "root", ".", "directory of the module")
	flags.StringVar(&q.since, "since", "", "the last release before the changes; its section and older ones do not count")
	flags.StringVar(&q.release, "release", "", "the release that is judged; newer sections do not count")
	flags.BoolVar(&q.stale, "stale", true, "complain of entries about what did not change")
	if err := flags.Parse(args); err != nil {
		return q, err
	}
	for _, arg := range flags.Args() {
		system, file, ok := strings.Cut(arg, "=")
		if !ok {
			return q, fmt.Errorf("argument %q: want SYSTEM=FILE, with what apidiff printed", arg)
		}
		q.reports[system] = file
	}
	return q, nil
}

func run(q question, w io.Writer) error {
	text, err := os.ReadFile(q.changelog)
	if err != nil {
		return err
	}
	public, err := findAliases(q.root, q.module)
	if err != nil {
		return err
	}
	changes, err := readReports(q.module, public, q.reports)
	if err != nil {
		return err
	}
	log := parseChangelog(string(text))
	complaints := append(disorder(log), judge(log, changes, q)...)
	if len(complaints) > 0 {
		return errors.New(strings.Join(complaints, "\n"))
	}
	if len(q.reports) == 0 {
		_, err = fmt.Fprintln(w, "the changelog is in order")
		return err
	}
	_, err = fmt.Fprint(w, summary(changes))
	return err
}
