package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"
)

// flagErrors collects what is wrong with a command line. The flag package would
// stop at the first error.
type flagErrors struct{ errs []error }

func (e *flagErrors) add(format string, args ...any) {
	e.errs = append(e.errs, fmt.Errorf(format, args...))
}

func (e *flagErrors) join() error { return errors.Join(e.errs...) }

// tolerate makes every flag report a value that it cannot read here, and go on.
func (e *flagErrors) tolerate(flags *pflag.FlagSet) {
	flags.VisitAll(func(f *pflag.Flag) { f.Value = &tolerant{f.Value, f.Name, e} })
}

// known returns the arguments without the flags that do not exist, and reports
// those.
func (e *flagErrors) known(flags *pflag.FlagSet, args []string) []string {
	var known []string
	for i := 0; i < len(args); i++ {
		arg := args[i]
		if arg == "--" {
			return append(known, args[i:]...)
		}
		name, _, hasValue := strings.Cut(arg, "=")
		flag := lookup(flags, name)
		next := !hasValue && i+1 < len(args)
		switch {
		case !strings.HasPrefix(arg, "-") || arg == "-":
			known = append(known, arg)
		case flag == nil:
			e.add("%s: no such flag; --help lists them", name)
			if next && !strings.HasPrefix(args[i+1], "-") {
				i++ // its value, most likely
			}
		case next && flag.NoOptDefVal == "" && takesNext(name):
			known = append(known, arg, args[i+1])
			i++
		default:
			known = append(known, arg)
		}
	}
	return known
}

// lookup finds "--name", or the first of the letters of "-abc".
func lookup(flags *pflag.FlagSet, name string) *pflag.Flag {
	if long, ok := strings.CutPrefix(name, "--"); ok {
		return flags.Lookup(long)
	}
	if len(name) < 2 {
		return nil
	}
	return flags.ShorthandLookup(name[1:2])
}

// takesNext tells "-v 4" from "-v4".
func takesNext(name string) bool { return strings.HasPrefix(name, "--") || len(name) == 2 }

// tolerant is a flag's value that can be anything.
type tolerant struct {
	pflag.Value
	name string
	errs *flagErrors
}

// Set implements pflag.Value. A text that cannot be read changes nothing, so that
// it is wrong in one way only.
func (t *tolerant) Set(text string) error {
	before := t.String()
	if err := t.Value.Set(text); err != nil {
		t.errs.add("--%s=%s: want a value of type %s", t.name, text, t.Type())
		return t.Value.Set(before) // a number has become 0
	}
	return nil
}
