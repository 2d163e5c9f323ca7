package main

import (
	"cmp"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"time"
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

// form is a command, and how many minutes it takes on two quiet processors.
type form struct {
	minutes float64
	env     []string
	argv    []string
}

// choice is a proof in one of its forms.
type choice struct {
	*proof
	form
	isShort bool
}

func (c *choice) title() string {
	if c.isShort {
		return c.name + " (short)"
	}
	return c.name
}

// shortest returns the form that takes the least time.
func (p *proof) shortest() choice {
	if p.short.argv != nil {
		return choice{p, p.short, true}
	}
	return choice{p, p.whole, false}
}

// draw shuffles the proofs, and takes each whose shortest form fits what is left of the budget.
func draw(all []proof, budget time.Duration, seed uint64) (drawn []choice) {
	left := budget.Minutes()
	for _, i := range rand.New(rand.NewPCG(seed, 0)).Perm(len(all)) {
		if c := all[i].shortest(); c.minutes <= left {
			left -= c.minutes
			drawn = append(drawn, c)
		}
	}
	return drawn
}

// choose takes what a change can break, within a budget: first the shortest form of each proof, the
// most telling one first, as far as the budget goes; then, in the same order, the whole form
// instead wherever it still fits. It returns too what had no room.
func choose(all []proof, m module, changed []string, budget time.Duration) (chosen []choice, left []*proof) {
	rest := budget.Minutes()
	for _, p := range telling(all, m, changed) {
		if c := p.shortest(); c.minutes <= rest {
			rest -= c.minutes
			chosen = append(chosen, c)
		} else {
			left = append(left, p)
		}
	}
	for i, c := range chosen {
		if more := c.whole.minutes - c.minutes; c.isShort && more <= rest {
			rest -= more
			chosen[i] = choice{c.proof, c.whole, false}
		}
	}
	return chosen, left
}

// telling returns the proofs that a change can break. Those come first whose own packages or files
// have changed, not only what they import; among them those that see more of the change in a minute, and
// for each of their own packages: one that is about everything says little about the change.
func telling(all []proof, m module, changed []string) (some []*proof) {
	type rank struct {
		direct  bool
		density float64
	}
	ranks := map[*proof]rank{}
	for i := range all {
		p := &all[i]
		if direct, n := p.sees(m, changed); n > 0 {
			ranks[p] = rank{direct, float64(n) / p.shortest().minutes / float64(max(1, len(m.match(p.packages))))}
			some = append(some, p)
		}
	}
	slices.SortStableFunc(some, func(a, b *proof) int {
		switch x, y := ranks[a], ranks[b]; {
		case x.direct == y.direct:
			return cmp.Compare(y.density, x.density)
		case x.direct:
			return -1
		default:
			return 1
		}
	})
	return some
}

// sees returns how many of the changed packages and other files can break the proof, and whether
// one is its own. The versions of dependencies can break whatever has packages.
func (p *proof) sees(m module, changed []string) (direct bool, n int) {
	own := m.match(p.packages)
	closure := m.closure(own)
	packages := map[string]bool{}
	for _, file := range changed {
		folder, isPackage := m.owner(file)
		switch {
		case slices.ContainsFunc(p.files, func(pattern string) bool { return matches(pattern, file) }):
			direct = true
			n++
		case file == "go.mod" || file == "go.sum":
			if len(own) > 0 {
				packages[file] = true
			}
		case !isPackage || !closure[folder]:
		case own[folder]:
			direct = true
			packages[folder] = true
		case !strings.HasSuffix(file, "_test.go"): // tests of what it only imports do not run
			packages[folder] = true
		}
	}
	return direct, n + len(packages)
}

func matches(pattern, file string) bool {
	if strings.HasSuffix(pattern, "/") {
		return strings.HasPrefix(file, pattern)
	}
	ok, err := path.Match(pattern, file)
	return ok && err == nil // a test tries each pattern
}

// module has the packages of the repository, by folder.
type module map[string]*pkg

// pkg has the folders of the packages that a package imports.
type pkg struct{ imports, testImports []string }

// match returns the folders that patterns such as ./desired and ./examples/... name.
func (m module) match(patterns []string) map[string]bool {
	folders := map[string]bool{}
	for _, pattern := range patterns {
		pattern = strings.TrimPrefix(pattern, "./")
		parent, below := strings.CutSuffix(pattern, "...")
		for folder := range m {
			if folder == pattern || below && (parent == "" || strings.HasPrefix(folder+"/", parent)) {
				folders[folder] = true
			}
		}
	}
	return folders
}

// closure returns packages, and all that they and their tests import, directly or not.
func (m module) closure(own map[string]bool) map[string]bool {
	seen := map[string]bool{}
	var visit func(folder string, tests bool)
	visit = func(folder string, tests bool) {
		p := m[folder]
		if p == nil || seen[folder] && !tests {
			return
		}
		seen[folder] = true
		for _, i := range p.imports {
			visit(i, false)
		}
		if tests {
			for _, i := range p.testImports {
				visit(i, false)
			}
		}
	}
	for folder := range own {
		visit(folder, true)
	}
	return seen
}

// owner returns the package that a file belongs to: in its folder, or in the nearest one above, as
// testdata and embedded files do. All above belongs to the top of the repository, which has a package
// too, so only Go files do there.
func (m module) owner(file string) (folder string, ok bool) {
	for folder = path.Dir(file); folder != "."; folder = path.Dir(folder) {
		if m[folder] != nil {
			return folder, true
		}
	}
	return folder, path.Dir(file) == "." && strings.HasSuffix(file, ".go")
}
