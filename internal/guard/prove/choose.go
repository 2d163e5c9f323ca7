package main

import (
	"context"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/serviceplane/serviceplane/internal/guard/gocmd"
)

// proof is one row of the table: something that the gate does not prove, or not in full.
type proof struct {
	name   string
	proves string
	// packages are the folders of the packages that it tests or builds; "..." stands for those below
	// a folder. What they import counts too.
	packages []string
	// files are other files that it depends on: patterns of path.Match, or folders that end in a slash.
	files []string
	needs []need
	// whole proves all of it. short proves a part by chance, in a few minutes; a proof that is short
	// itself has none.
	whole, short form
}

// form is a command after settings, as env(1) takes them, and how many minutes it takes on two quiet processors.
type form struct {
	minutes float64
	words   []string
}

// choice is a proof in one of its forms.
type choice struct {
	*proof
	form
	title string
}

// in returns the whole of the proof, or its short form if it has one.
func (p *proof) in(short bool) choice {
	if short && p.short.words != nil {
		return choice{p, p.short, p.name + " (short)"}
	}
	return choice{p, p.whole, p.name}
}

// draw shuffles the proofs, and takes each whose shortest form fits what is left of the budget.
func draw(all []proof, budget time.Duration, seed uint64) (drawn []choice) {
	left := budget.Minutes()
	for _, i := range rand.New(rand.NewPCG(seed, 0)).Perm(len(all)) {
		if c := all[i].in(true); c.minutes <= left {
			left -= c.minutes
			drawn = append(drawn, c)
		}
	}
	return drawn
}

// choose takes what a change can break, within a budget: first the shortest form of each proof, the
// most telling one first, as far as the budget goes; then, in the same order, the whole form
// instead wherever it still fits. It returns too what had no room.
func choose(all []proof, m module, changed []string, budget time.Duration) (chosen, left []choice) {
	rest := budget.Minutes()
	for _, p := range telling(all, m, changed) {
		if c := p.in(true); c.minutes <= rest {
			rest -= c.minutes
			chosen = append(chosen, c)
		} else {
			left = append(left, c)
		}
	}
	for i, c := range chosen {
		if more := c.whole.minutes - c.minutes; more <= rest {
			rest -= more
			chosen[i] = c.in(false)
		}
	}
	return chosen, left
}

// telling returns the proofs that a change can break. A proof comes first if its own packages or files
// have changed, not only what they import; among such proofs, one that sees more of the change in a minute, and
// for each of its own packages: a proof about everything says little about the change.
func telling(all []proof, m module, changed []string) (some []*proof) {
	ranks := map[*proof][]float64{}
	for i := range all {
		p := &all[i]
		if direct, n := p.sees(m, changed); n > 0 {
			ranks[p] = []float64{0, float64(n) / p.in(true).minutes / float64(max(1, len(m.match(p.packages))))}
			if direct {
				ranks[p][0] = 1
			}
			some = append(some, p)
		}
	}
	slices.SortStableFunc(some, func(a, b *proof) int { return slices.Compare(ranks[b], ranks[a]) })
	return some
}

// sees returns how many of the changed packages and other files can break the proof, and whether
// one is its own. The versions of dependencies can break whatever has packages.
func (p *proof) sees(m module, changed []string) (direct bool, n int) {
	own, seen := m.match(p.packages), map[string]bool{}
	for _, file := range changed {
		folder := m.owner(file)
		switch {
		case slices.ContainsFunc(p.files, func(pattern string) bool {
			ok, err := path.Match(pattern, file) // a test tries each pattern
			return ok && err == nil || strings.HasSuffix(pattern, "/") && strings.HasPrefix(file, pattern)
		}):
			direct, seen[file] = true, true
		case slices.Contains(own, folder):
			direct, seen[folder] = true, true
		case slices.Contains([]string{"go.mod", "go.sum", "go.work", "go.work.sum"}, path.Base(file)): // one list of versions for all modules
			if len(own) > 0 {
				seen[file] = true
			}
		case strings.HasSuffix(file, "_test.go"): // tests of what it only imports do not run
		case slices.ContainsFunc(own, func(of string) bool { return slices.Contains(m[of].deps, folder) }):
			seen[folder] = true
		}
	}
	return direct, len(seen)
}

// module has the packages of the repository, by folder.
type module map[string]pkg

// pkg has the folders of the packages that a package's tests import, and of all that the package
// and its tests import, directly or not.
type pkg struct{ tests, deps []string }

// list reads the packages of the repository as they are on Linux, with the tests for virtual machines.
func list(ctx context.Context) (module, error) {
	all, err := gocmd.List(ctx, ".", []string{"GOOS=linux", "CGO_ENABLED=0"}, "-tags=vm", "-test")
	return collect(all), err
}

// collect takes what go list -test says. The program with a package's tests has the package's path, and ".test".
// What is built again for a test has a space in its path, and says nothing new.
func collect(all []gocmd.Package) module {
	m := module{}
	for _, p := range all {
		for _, folder := range folders(strings.TrimSuffix(p.ImportPath, ".test")) {
			if tests := append(p.TestImports, p.XTestImports...); !strings.Contains(p.ImportPath, " ") {
				m[folder] = pkg{append(m[folder].tests, folders(tests...)...), append(m[folder].deps, folders(p.Deps...)...)}
			}
		}
	}
	return m
}

// folders returns where the packages of the repository are, of those that are named.
func folders(imports ...string) (some []string) {
	for _, i := range imports {
		i, _, _ = strings.Cut(i, " ")
		if folder, ok := strings.CutPrefix(i+"/", gocmd.Module+"/"); ok {
			some = append(some, path.Clean(folder))
		}
	}
	return some
}

// match returns the folders that patterns such as ./desired and ./examples/... name.
func (m module) match(patterns []string) (folders []string) {
	for folder := range m {
		if slices.ContainsFunc(patterns, func(pattern string) bool {
			parent, below := strings.CutSuffix(strings.TrimPrefix(pattern, "./"), "...")
			return folder == parent || below && strings.HasPrefix(folder+"/", parent)
		}) {
			folders = append(folders, folder)
		}
	}
	return folders
}

// owner returns the package that a file belongs to: in its folder, or in the nearest one above, as
// testdata and embedded files do. All above belongs to the top of the repository, which has a package
// too, so only Go files do there.
func (m module) owner(file string) string {
	for folder := path.Dir(file); folder != "."; folder = path.Dir(folder) {
		if _, ok := m[folder]; ok {
			return folder
		}
	}
	if path.Dir(file) == "." && strings.HasSuffix(file, ".go") {
		return "."
	}
	return "" // is no package
}
