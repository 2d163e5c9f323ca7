package errtree

import (
	"errors"
	"fmt"
	"testing"
)

type known struct{ n int }

func (k *known) Error() string { return fmt.Sprint("known ", k.n) }

type node []error

func (n node) Error() string   { return "node" }
func (n node) Unwrap() []error { return n }

func TestSplit(t *testing.T) {
	one, two, other := &known{1}, &known{2}, errors.New("other")
	wrap := func(err error) error { return fmt.Errorf("wrapped: %w", err) }
	for name, test := range map[string]struct {
		err   error
		found int
		rest  string
	}{
		"nil":                          {},
		"one":                          {err: one, found: 1},
		"wrapped":                      {err: wrap(wrap(one)), found: 1},
		"joined":                       {err: errors.Join(one, two, nil), found: 2},
		"repeated":                     {err: errors.Join(one, one), found: 2},
		"wrapped join":                 {err: wrap(errors.Join(one, two)), found: 2},
		"several wrapped":              {err: fmt.Errorf("%w and %w", one, two), found: 2},
		"other":                        {err: other, rest: "other"},
		"joined with other":            {err: errors.Join(one, other), found: 1, rest: "other"},
		"wrapped join with other":      {err: wrap(errors.Join(one, other)), found: 1, rest: "wrapped: known 1\nother"},
		"deep":                         {err: errors.Join(two, wrap(errors.Join(one, wrap(other)))), found: 2, rest: "wrapped: known 1\nwrapped: other"},
		"nil wrapped":                  {err: wrap(nil), rest: "wrapped: %!w(<nil>)"},
		"only nil joined":              {err: node{nil, nil}, rest: "node"},
		"nothing joined":               {err: node{}, rest: "node"},
		"nil joined with one":          {err: node{nil, one}, found: 1},
		"joined with an empty failure": {err: node{node{}, one}, found: 1, rest: "node"},
	} {
		t.Run(name, func(t *testing.T) {
			found, rest := Split(test.err, As[*known])
			if len(found) != test.found {
				t.Errorf("found %v, want %d", found, test.found)
			}
			if text := ""; rest != nil || test.rest != "" {
				if rest != nil {
					text = rest.Error()
				}
				if text != test.rest {
					t.Errorf("rest = %q, want %q", text, test.rest)
				}
			}
		})
	}
}
