// Command kernels prints a table: how many checks of each engine's packet tests passed,
// failed and were skipped on each kernel. Its arguments are folders, named like their
// kernels, with files that hold the output of go test -json. It fails if a check failed or
// was skipped, or if there are none.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/serviceplane/serviceplane/internal/guard/gocmd"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

const head = `| Linux | nftables | iptables, nft | iptables, legacy | ebpf | ipvs | userspace behind nftables | userspace behind iptables |
|---|--:|--:|--:|--:|--:|--:|--:|
`

// columns are the tests of each data plane, with the last part of their package's path.
var columns = []string{ // read-only
	"nftables/TestPackets", "iptables/TestPacketsWithNFT", "iptables/TestPacketsWithLegacy", "ebpf/TestPackets",
	"ipvs/(TestPackets|TestAffinityEndsAfterItsTimeout)", "userspace/TestPacketsWithNFTables", "userspace/TestPacketsWithIPTables",
}

func run(folders []string, w io.Writer) error {
	table, total := head, counts{}
	for _, folder := range folders {
		last, err := read(folder)
		if err != nil {
			return err
		}
		table += "| " + filepath.Base(folder) + " |"
		for _, tests := range columns {
			n := count(last, regexp.MustCompile("^"+tests+"(/|$)"))
			total = counts{total.passed + n.passed, total.failed + n.failed, total.skipped + n.skipped}
			table += " " + n.String() + " |"
		}
		table += "\n"
	}
	_, err := io.WriteString(w, table)
	switch {
	case err != nil:
		return err
	case total.failed+total.skipped > 0:
		return errors.New("checks failed or were skipped")
	case total.passed == 0:
		return errors.New("no check passed")
	}
	return nil
}

// read returns the last Action of each test: a path of the package's last part and the test's name.
func read(folder string) (map[string]string, error) {
	files, err := os.ReadDir(folder)
	last := map[string]string{}
	for _, file := range files {
		text, err := os.ReadFile(filepath.Join(folder, file.Name()))
		if err != nil {
			return nil, err
		}
		for e := range gocmd.Events(text) {
			if e.Test != "" && slices.Contains([]string{"run", "pass", "fail", "skip"}, e.Action) {
				last[path.Join(path.Base(e.Package), e.Test)] = e.Action
			}
		}
	}
	return last, err
}

// counts are the checks of one data plane on one kernel.
type counts struct{ passed, failed, skipped int }

// count counts the tests that have no subtests: each is about one kind of packet. A test
// that only began has failed.
func count(last map[string]string, tests *regexp.Regexp) (n counts) {
	parents := map[string]bool{}
	for test := range last {
		for parent := path.Dir(test); parent != "."; parent = path.Dir(parent) {
			parents[parent] = true
		}
	}
	for test, action := range last {
		switch {
		case !tests.MatchString(test) || parents[test] && action == "pass":
		case action == "pass":
			n.passed++
		case action == "skip":
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
