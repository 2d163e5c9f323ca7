package spctl

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"

	"github.com/spf13/cobra"

	"github.com/serviceplane/serviceplane/internal/answers"
)

// verifyResult is what the exit status says.
func verifyResult(v *answers.Verification) error {
	for i := range v.Families {
		if f := &v.Families[i]; f.Error != "" {
			return fmt.Errorf("%s was not compared with the kernel: %s", f.Family, f.Error)
		}
	}
	if !v.Agrees {
		return ErrDifferent
	}
	return nil
}

func (a *app) verify() *cobra.Command {
	return plain("verify", "Compare the kernel with what should be programmed, and change nothing",
		"Compare the kernel with what should be programmed, object by object, and change nothing. The exit status is 1 if there are differences, and 2 if it could not be compared.", func(c *cobra.Command) error {
			var results []error
			err := a.perNode(c, "verify", url.Values{}, func(w *printer, r []response) error {
				return w.verified(r, a.options.Nodes != nil)
			}, func(content json.RawMessage) error {
				answer, err := decode[answers.Verification](content)
				results = append(results, err, verifyResult(&answer))
				return err
			})
			return worst(append(results, err))
		})
}

// worst returns the errors, and ErrDifferent only without others.
func worst(errs []error) error {
	var others []error
	different := false
	for _, err := range errs {
		if errors.Is(err, ErrDifferent) {
			different = true
		} else {
			others = append(others, err)
		}
	}
	if err := errors.Join(others...); err != nil || !different {
		return err
	}
	return ErrDifferent
}

// ofNode is a part of the answer of a node.
type ofNode[T any] struct {
	node string
	part T
}

// parts decodes answers, and returns the parts of all.
func parts[A, T any](responses []response, of func(*A) []T) (all []ofNode[T], err error) {
	for i := range responses {
		answer, err := decode[A](responses[i].Answer)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", responses[i].Node, err)
		}
		for _, part := range of(&answer) {
			all = append(all, ofNode[T]{responses[i].Node, part})
		}
	}
	return all, nil
}

// perNodeRows prints a table whose first column is the node, if there may be several.
func perNodeRows[T any](w *printer, heading string, all []ofNode[T], withNode bool, cells func(T) []string) {
	if withNode {
		heading = "NODE " + heading
	}
	rows(w, heading, all, func(p ofNode[T]) []string {
		if withNode {
			return append([]string{p.node}, cells(p.part)...)
		}
		return cells(p.part)
	})
}

func (w *printer) verified(responses []response, withNode bool) error {
	families, err := parts(responses, func(v *answers.Verification) []answers.VerifiedFamily { return v.Families })
	if err != nil {
		return err
	}
	var found []ofNode[answers.Difference]
	perNodeRows(w, "FAMILY OBJECTS DIFFERENCES ERROR", families, withNode, func(f answers.VerifiedFamily) []string {
		return []string{f.Family, fmt.Sprint(f.Checked), fmt.Sprint(max(f.Total, len(f.Differences))), f.Error}
	})
	for _, f := range families {
		for _, d := range f.part.Differences {
			found = append(found, ofNode[answers.Difference]{f.node, d})
		}
	}
	if len(found) > 0 {
		w.section("Differences:")
	}
	perNodeRows(w, "PROBLEM SERVICE OBJECT WANT HAVE", found, withNode, func(d answers.Difference) []string {
		return []string{d.Problem, d.Service, d.Object, d.Want, d.Have}
	})
	return nil
}
