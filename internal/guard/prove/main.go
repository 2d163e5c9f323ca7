// Command prove runs proofs: what the gate, hack/test.sh, does not prove, or only in part. Run it
// in the top of the repository, by hack/prove.sh:
//
//	prove                             lists all proofs
//	prove NAME…                       runs some; a name may be a pattern, such as kernel-*
//	prove -changed BASE -budget 30m   runs those that the change since a commit can break, the most telling first
//	prove -draw -budget 10m           runs some by chance
//
// With -short, named proofs prove a part by chance. With -n nothing runs. A budget is for the
// choice, by estimates; no proof ends because of it.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/serviceplane/serviceplane/internal/guard/gocmd"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	r := &prover{out: os.Stdout, root: runtime.GOOS == "linux" && os.Geteuid() == 0, met: map[need]bool{}}
	if err := r.main(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// options are what the command line asks for.
type options struct {
	base               string
	budget             time.Duration
	seed               uint64
	draw, short, print bool
	names              []string
}

func parseFlags(args []string) (o options, err error) {
	flags := flag.NewFlagSet("prove", flag.ContinueOnError)
	flags.StringVar(&o.base, "changed", "", "run what the change since this `commit` can break")
	flags.BoolVar(&o.draw, "draw", false, "run some proofs by chance")
	flags.DurationVar(&o.budget, "budget", 30*time.Minute, "how long -changed and -draw may take, by estimates")
	flags.Uint64Var(&o.seed, "seed", 0, "the seed of -draw; 0 for a new one")
	flags.BoolVar(&o.short, "short", false, "of the named proofs, run the short form")
	flags.BoolVar(&o.print, "n", false, "print what would run, and run nothing")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	o.names = flags.Args()
	for _, name := range o.names {
		if strings.HasPrefix(name, "-") {
			return o, fmt.Errorf("%s comes after a name: write it before", name)
		}
	}
	if named := len(o.names) > 0; o.base != "" && (o.draw || named) || o.draw && named {
		return o, errors.New("want one of -changed, -draw and names")
	}
	return o, nil
}

func (r *prover) main(ctx context.Context, args []string) error {
	o, err := parseFlags(args)
	var chosen []choice
	switch {
	case err != nil:
		return err
	case o.base != "":
		chosen, err = r.changed(ctx, &o)
	case o.draw:
		seed := cmp.Or(o.seed, rand.Uint64())
		r.say("drawn by chance; the same again: hack/prove.sh -draw -budget %s -seed %d\n", o.budget, seed)
		chosen = draw(r.possible(), o.budget, seed)
	case len(o.names) > 0:
		chosen, err = named(proofs(), o.names, o.short)
	default:
		r.list(proofs())
		return nil
	}
	switch {
	case err != nil:
		return err
	case len(chosen) == 0:
		r.say("no proof to run\n")
	case !o.print:
		return r.run(ctx, chosen)
	}
	for _, c := range chosen {
		r.say("%s, about %g min: %s\n", c.title, c.minutes, c.command())
	}
	return nil
}

// possible returns the proofs that can run here, and says which cannot.
func (r *prover) possible() []proof {
	all := proofs()
	some := slices.DeleteFunc(slices.Clone(all), func(p proof) bool { return !r.can(&p) })
	if left := len(all) - len(some); left > 0 {
		r.say("!! NOT ROOT ON LINUX: %d of %d proofs are left out; run as root.\n", left, len(all))
	}
	return some
}

// changed returns the proofs that may break by what differs from a commit, also in files that are not committed yet.
func (r *prover) changed(ctx context.Context, o *options) ([]choice, error) {
	git := []string{"git", "-c", "core.quotePath=false"}
	differ, err := gocmd.Output(ctx, ".", nil, append(git, "diff", "--name-only", "--no-renames", o.base, "--")...)
	added, errAdded := gocmd.Output(ctx, ".", nil, append(git, "ls-files", "--others", "--exclude-standard")...)
	m, errList := list(ctx)
	if err := errors.Join(err, errAdded, errList); err != nil {
		return nil, err
	}
	files := strings.Fields(string(differ) + string(added))
	chosen, left := choose(r.possible(), m, files, o.budget)
	r.say("%d changed files can break %d proofs; %d of these have room in %s\n", len(files), len(chosen)+len(left), len(chosen), o.budget)
	for _, c := range left {
		r.say("  no room: %s, %g min\n", c.name, c.minutes)
	}
	return chosen, nil
}

// named returns the proofs that patterns name, in the order of the patterns.
func named(all []proof, patterns []string, short bool) (chosen []choice, err error) {
	for _, pattern := range patterns {
		before := len(chosen)
		for i := range all {
			ok, err := path.Match(pattern, all[i].name)
			if err != nil {
				return nil, fmt.Errorf("pattern %q: %w", pattern, err)
			}
			if ok && !slices.ContainsFunc(chosen, func(c choice) bool { return c.proof == &all[i] }) {
				chosen = append(chosen, all[i].in(short))
			}
		}
		if len(chosen) == before {
			return nil, fmt.Errorf("no other proof is named %q: hack/prove.sh lists all", pattern)
		}
	}
	return chosen, nil
}

// list prints the table of proofs.
func (r *prover) list(all []proof) {
	rows := []string{"proof\ttakes\tshort\tproves"}
	for _, p := range all {
		short := "-"
		if p.short.words != nil {
			short = fmt.Sprintf("%g min", p.short.minutes)
		}
		rows = append(rows, fmt.Sprintf("%s\t%g min\t%s\t%s", p.name, p.whole.minutes, short, strings.TrimSuffix(p.proves, ".")))
	}
	r.table(rows)
}
