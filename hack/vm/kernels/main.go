// Command kernels prints a table: how many checks of each engine's packet tests passed,
// failed and were skipped on each kernel. Its arguments are folders, named like their
// kernels, with files that hold the output of go test -json. It fails if a check failed or
// was skipped, or if there are none.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// column is one data plane: the packet tests of a package.
type column struct {
	title, folder string
	tests         []string
}

func columns() []column {
	return []column{
		{"nftables", "nftables", []string{"TestPackets"}},
		{"iptables, nft", "iptables", []string{"TestPacketsWithNFT"}},
		{"iptables, legacy", "iptables", []string{"TestPacketsWithLegacy"}},
		{"ebpf", "ebpf", []string{"TestPackets"}},
		{"ipvs", "ipvs", []string{"TestPackets", "TestAffinityEndsAfterItsTimeout"}},
		{"userspace behind nftables", "userspace", []string{"TestPacketsWithNFTables"}},
		{"userspace behind iptables", "userspace", []string{"TestPacketsWithIPTables"}},
	}
}

func (c *column) has(folder, test string) bool {
	top, _, _ := strings.Cut(test, "/")
	for _, t := range c.tests {
		if c.folder == folder && t == top {
			return true
		}
	}
	return false
}

// event is one line of go test -json, see go doc test2json.
type event struct{ Action, Package, Test string }

// key is a test of a package, which the last part of its path names.
type key struct{ folder, test string }

// results has the last Action of each test.
type results map[key]string

func run(folders []string, w io.Writer) error {
	var b strings.Builder
	b.WriteString("| Linux |")
	for _, c := range columns() {
		b.WriteString(" " + c.title + " |")
	}
	b.WriteString("\n|---|" + strings.Repeat("--:|", len(columns())) + "\n")
	var failed, passed int
	for _, folder := range folders {
		r, err := read(folder)
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "| %s |", filepath.Base(folder))
		for _, c := range columns() {
			n := r.count(&c)
			failed += n.failed + n.skipped
			passed += n.passed
			fmt.Fprintf(&b, " %s |", n)
		}
		b.WriteString("\n")
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return err
	}
	switch {
	case failed > 0:
		return errors.New("checks failed or were skipped")
	case passed == 0:
		return errors.New("no check passed")
	}
	return nil
}

func read(folder string) (results, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*"))
	if err != nil {
		return nil, err
	}
	r := results{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for line := range bytes.Lines(text) {
			r.take(line)
		}
	}
	return r, nil
}

// take reads one line. What is no event is output of a build.
func (r results) take(line []byte) {
	var e event
	if json.Unmarshal(line, &e) != nil || e.Test == "" {
		return
	}
	switch e.Action {
	case "run", "pass", "fail", "skip":
		r[key{path.Base(e.Package), e.Test}] = e.Action
	}
}

// counts are the checks of one data plane on one kernel.
type counts struct{ passed, failed, skipped int }

// count counts the tests that have no subtests: each is about one kind of packet. A test
// that only began has failed.
func (r results) count(c *column) (n counts) {
	parents := map[key]bool{}
	for k := range r {
		for parent := path.Dir(k.test); parent != "."; parent = path.Dir(parent) {
			parents[key{k.folder, parent}] = true
		}
	}
	for k, action := range r {
		if !c.has(k.folder, k.test) || parents[k] && action == "pass" {
			continue
		}
		switch action {
		case "pass":
			n.passed++
		case "skip":
			n.skipped++
		default:
			n.failed++
		}
	}
	return n
}

func (n counts) String() string {
	if n == (counts{}) {
		return "–"
	}
	return fmt.Sprintf("%d / %d / %d", n.passed, n.failed, n.skipped)
}
