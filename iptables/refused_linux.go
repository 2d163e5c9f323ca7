package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

// maxRefusals is how many times a sync writes again without the service ports that
// iptables-restore has refused.
const maxRefusals = 8

// write brings the tables to the model: the changes, or everything after reading the
// tables. It sets aside the service ports that iptables-restore refuses twice: the first time
// another program may have deleted a chain meanwhile.
func (e *engine) write(ctx context.Context, everything bool) error {
	for attempt := 0; ; attempt++ {
		script, err := e.writeOnce(ctx, everything)
		failed, refused := errors.AsType[*restoreError](err)
		if !refused {
			return err
		}
		if attempt > maxRefusals || attempt > 0 && !e.refuseNamed(err, failed.Lines, script) {
			return e.isolate(ctx, err)
		}
		everything = true // some tables may have been committed
	}
}

// refuseNamed sets aside the service ports of the lines that an error names. It returns false
// if there are none.
func (e *engine) refuseNamed(err error, numbers []int, input string) (found bool) {
	lines, owner := strings.Split(input, "\n"), e.model.owners()
	for _, number := range numbers {
		if number < 1 || number > len(lines) {
			continue
		}
		line := lines[number-1]
		chain, text, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(line, ":"), "-A "), " ")
		name := owner(chain, rule(text))
		if _, ok := e.updated[name]; !ok {
			continue // accepted by an earlier sync, or refused already
		}
		e.refuse(name, fmt.Errorf("%w: in %q", err, line))
		found = true
	}
	return found
}

// isolate finds the refused service ports when the error names no line of theirs, as when
// the kernel refuses a table of iptables-legacy. If the write also fails without any
// service port of the update, it returns cause.
func (e *engine) isolate(ctx context.Context, cause error) error {
	names := slices.SortedFunc(maps.Keys(e.updated), changetracker.ServicePortName.Compare)
	for _, name := range names {
		e.model.set(name, e.updated[name].before)
	}
	if _, err := e.writeOnce(ctx, true); err != nil {
		return errors.Join(cause, err)
	}
	if err := e.admit(ctx, names); err != nil {
		return err
	}
	_, err := e.writeOnce(ctx, true)
	return err
}

// admit writes service ports; if they are refused, it writes each half of them alone.
func (e *engine) admit(ctx context.Context, names []changetracker.ServicePortName) error {
	for _, name := range names {
		e.model.set(name, e.updated[name].after)
	}
	_, err := e.writeOnce(ctx, true)
	if _, refused := errors.AsType[*restoreError](err); !refused {
		return err
	}
	for _, name := range names {
		e.model.set(name, e.updated[name].before)
	}
	if len(names) == 1 {
		e.refuse(names[0], err)
		return nil
	}
	if len(names) == 0 { // other programs have written meanwhile
		return err
	}
	half := len(names) / 2
	if err := e.admit(ctx, names[:half]); err != nil {
		return err
	}
	return e.admit(ctx, names[half:])
}

// refuse sets a service port aside: its previous rules stay.
func (e *engine) refuse(name changetracker.ServicePortName, err error) {
	e.refused = append(e.refused, &proxier.ServiceError{Name: name, Err: err})
	e.model.set(name, e.updated[name].before)
	delete(e.updated, name)
}
