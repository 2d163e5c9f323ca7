package nodeproxy

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"
)

// faults are all errors of a command line. Package pflag stops at the first one.
type faults []error

func (f *faults) add(format string, args ...any) { *f = append(*f, fmt.Errorf(format, args...)) }

func (f *faults) check(ok bool, flag string, value any, want string) {
	if !ok {
		*f = append(*f, &badValueError{flag, fmt.Sprint(value), want})
	}
}

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
func (f *faults) tolerate(flags *pflag.FlagSet) {
	flags.VisitAll(func(flag *pflag.Flag) { flag.Value = &tolerant{flag.Value, flag.Name, f} })
}

// known returns the arguments without unknown flags, and records those.
func (f *faults) known(flags *pflag.FlagSet, args []string) []string {
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
			f.add("%s: no such flag; --help lists them", name)
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
	before := *t.errs
	err := flags.Set(f.Name, text)
	err = errors.Join(append((*t.errs)[len(before):], err)...)
	*t.errs = before
	return err
}

// tolerant is the value of a flag whose Set does not fail.
type tolerant struct {
	pflag.Value
	name string
	errs *faults
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
