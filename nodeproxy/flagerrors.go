package nodeproxy

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"
)

// flagErrors collects all errors of a command line. Package pflag stops at the first one.
type flagErrors struct{ errs []error }

func (e *flagErrors) add(format string, args ...any) {
	e.errs = append(e.errs, fmt.Errorf(format, args...))
}

func (e *flagErrors) join() error { return errors.Join(e.errs...) }

// badValueError is a flag that has a value which it must not have.
type badValueError struct{ flag, value, want string }

func (b *badValueError) Error() string {
	return fmt.Sprintf("--%s=%s: want %s", b.flag, b.value, b.want)
}

// located adds the fields of a file that have set flags to their errors.
func located(err error, origins map[string]string) error {
	if all, ok := err.(interface{ Unwrap() []error }); ok {
		var errs []error
		for _, err := range all.Unwrap() {
			errs = append(errs, located(err, origins))
		}
		return errors.Join(errs...)
	}
	if bad := (*badValueError)(nil); errors.As(err, &bad) && origins[bad.flag] != "" {
		return fmt.Errorf("%s: %w", origins[bad.flag], err)
	}
	return err
}

// tolerate makes flags record invalid values instead of failing.
func (e *flagErrors) tolerate(flags *pflag.FlagSet) {
	flags.VisitAll(func(f *pflag.Flag) { f.Value = &tolerant{f.Value, f.Name, e} })
}

// known returns the arguments without unknown flags, and records those.
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
				i++ // probably its value
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

// lookup returns the flag of "--name", or of the first letter of "-abc".
func lookup(flags *pflag.FlagSet, name string) *pflag.Flag {
	if long, ok := strings.CutPrefix(name, "--"); ok {
		return flags.Lookup(long)
	}
	if len(name) < 2 {
		return nil
	}
	return flags.ShorthandLookup(name[1:2])
}

// takesNext reports whether the value is the next argument, as in "-v 4" and not "-v4".
func takesNext(name string) bool { return strings.HasPrefix(name, "--") || len(name) == 2 }

// setStrictly sets a flag. It returns the error that a tolerant one would only record.
func setStrictly(flags *pflag.FlagSet, f *pflag.Flag, text string) error {
	t, ok := f.Value.(*tolerant)
	if !ok {
		return flags.Set(f.Name, text)
	}
	recorded := len(t.errs.errs)
	err := flags.Set(f.Name, text)
	err = errors.Join(append(t.errs.errs[recorded:], err)...)
	t.errs.errs = t.errs.errs[:recorded]
	return err
}

// tolerant is the value of a flag whose Set does not fail.
type tolerant struct {
	pflag.Value
	name string
	errs *flagErrors
}

// Set implements pflag.Value. An invalid text keeps the previous value, so that it causes
// one error only.
func (t *tolerant) Set(text string) error {
	before := t.String()
	if err := t.Value.Set(text); err != nil {
		t.errs.add("--%s=%s: want a value of type %s", t.name, text, t.Type())
		return t.Value.Set(before) // numbers were set to 0
	}
	return nil
}
