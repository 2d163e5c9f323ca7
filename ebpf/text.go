package ebpf

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/serviceplane/serviceplane/desired"
)

// text lists each frontend of an Update: by sockets, or by rules and why.
func (c *Sockets) text(update *desired.Update) string {
	var lines []string
	for s := range update.Services() {
		for i := range s.Frontends {
			f := &s.Frontends[i]
			scope, why := c.judge(s, f, &update.Globals)
			line := fmt.Sprintf("%v %v: by sockets, %d endpoints", s.Name, s.Key(f), s.Endpoints(scope).Len())
			if why != Carried {
				line = fmt.Sprintf("%v %v: by rules, because %v", s.Name, s.Key(f), why)
			}
			lines = append(lines, line+"\n")
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

// dump prints the frontends in the maps.
func dump(w io.Writer, k kernel) error {
	all, err := k.frontends()
	if err != nil {
		return err
	}
	for _, at := range slices.SortedFunc(maps.Keys(all), desired.Key.Compare) {
		to := all[at]
		p := k.pick(to)
		if _, err := fmt.Fprintf(w, "socket %v: service %d, %d endpoints from %d\n", at, to.service, p.count(), p.block().first); err != nil {
			return fmt.Errorf("print the frontends of sockets: %w", err)
		}
	}
	return nil
}
