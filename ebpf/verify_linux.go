package ebpf

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/bpfx"
	"github.com/serviceplane/serviceplane/proxier"
)

// Verify is for proxier.Abilities: it compares the frontends in the maps, their endpoints, what is
// pinned, the links with their cgroups, programs and the maps that those use, and the rules. It does not
// compare the instructions of the programs. If sockets are not translated,
// it compares the rules alone. Without CAP_SYS_ADMIN, the maps of programs cannot be read: then each link must
// have the program that Apply has given it.
func (e *Engine) Verify(ctx context.Context, update desired.Update) (proxier.Verification, error) {
	report, err := e.verifySockets(&update)
	if err != nil {
		return proxier.Verification{}, err
	}
	rules, err := e.rules.Abilities().Verify(ctx, update)
	report.Checked += rules.Checked
	report.Differences = append(report.Differences, rules.Differences...)
	return report, err
}

func (e *Engine) verifySockets(update *desired.Update) (proxier.Verification, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := cmp.Or(e.programs, e.closedPrograms())
	if err := p.check(); errors.Is(err, errUnavailable) || e.without != nil {
		return proxier.Verification{}, nil
	} else if err != nil {
		return proxier.Verification{}, err
	}
	v := verification{programs: p, ids: map[string]ebpf.MapID{}}
	if err := v.pins(); err != nil {
		return proxier.Verification{}, err
	}
	var have map[desired.Key]place
	var t *tables
	var err error
	if e.layer != nil { // what the programs use, whatever is pinned
		t = tablesOf(e.layer.kernel)
	} else if t, _, err = p.loadTables(); t != nil {
		defer func() { _ = t.close() }()
	}
	if t != nil {
		have, err = t.frontends()
	}
	if err != nil {
		return proxier.Verification{}, err
	}
	v.frontends(t, have, e.config.Sockets.wantedOf(update))
	return v.report, v.links()
}

// wantedFrontend is where sockets should lead.
type wantedFrontend struct {
	name      changetracker.ServicePortName
	endpoints desired.Endpoints
}

func (c *Sockets) wantedOf(update *desired.Update) map[desired.Key]wantedFrontend {
	all := map[desired.Key]wantedFrontend{}
	for s := range update.Services() {
		w := c.carry(s, &update.Globals)
		if w == nil {
			continue
		}
		for at, scope := range w.frontends {
			all[at] = wantedFrontend{s.Name, w.endpoints[scope]}
		}
	}
	return all
}

// verification compares what the kernel has with what it should have.
type verification struct {
	programs *programs
	ids      map[string]ebpf.MapID // of the maps that programs should use
	report   proxier.Verification
}

func (v *verification) differs(d proxier.Difference) {
	v.report.Differences = append(v.report.Differences, d)
}

// pins compares what is pinned with the maps that this process has open, if it has.
func (v *verification) pins() error {
	for _, name := range append(layerMaps(), sharedMaps()...) {
		v.report.Checked++
		path := v.programs.pin(name)
		object, have := "pinned map "+path, idOfPinned(path)
		if have == 0 {
			v.differs(proxier.Difference{Object: object, Problem: proxier.DifferenceMissing})
		}
		v.ids[name] = have
		m := v.programs.used[name]
		if m == nil {
			continue
		}
		var err error
		if v.ids[name], err = idOf(m); err != nil {
			return err
		}
		if have != 0 && have != v.ids[name] {
			v.differs(proxier.Difference{
				Object: object, Problem: proxier.DifferenceChanged,
				Want: fmt.Sprintf("map %d", v.ids[name]), Have: fmt.Sprintf("map %d", have),
			})
		}
	}
	return nil
}

// frontends compares what is in the maps, if there are any.
func (v *verification) frontends(t *tables, have map[desired.Key]place, wanted map[desired.Key]wantedFrontend) {
	for at, to := range have {
		v.report.Checked++
		w, isWanted := wanted[at]
		d := proxier.Difference{Object: v.frontend(at), Problem: proxier.DifferenceChanged, Service: w.name, Want: words(w.endpoints)}
		switch endpoints, readable := t.endpointsOf(to, t.size); {
		case !isWanted:
			d.Problem, d.Want, d.Have = proxier.DifferenceUnexpected, "", words(endpoints)
		case !readable:
			d.Have = fmt.Sprintf("service %d, scope %d, which does not exist", to.service, to.scope)
		case endpoints.Equal(w.endpoints):
			continue
		default:
			d.Have = words(endpoints)
		}
		v.differs(d)
	}
	for at, w := range wanted {
		if _, there := have[at]; !there {
			v.report.Checked++
			v.differs(proxier.Difference{Object: v.frontend(at), Problem: proxier.DifferenceMissing, Want: words(w.endpoints), Service: w.name})
		}
	}
}

func (v *verification) frontend(at desired.Key) string {
	return fmt.Sprintf("element %v of map %s of %s", at, mapFrontends, v.programs.family)
}

func words(endpoints desired.Endpoints) string {
	texts := make([]string, 0, endpoints.Len())
	for e := range endpoints.All() {
		texts = append(texts, e.String())
	}
	return strings.Join(texts, ", ")
}

// endpointsOf reads where a frontend leads. ok is false if that is outside of the maps.
func (m *tables) endpointsOf(at place, size capacity) (endpoints desired.Endpoints, ok bool) {
	if at.service >= size.services || at.scope >= scopes {
		return endpoints, false
	}
	p := m.rangeAt(at)
	first, n := uint64(p>>32), uint64(p.count())
	if first+n > uint64(size.endpoints) {
		return endpoints, false
	}
	all := make([]netip.AddrPort, 0, n)
	for i := first; i < first+n; i++ {
		is := m.endpoint(uint32(i))
		addr, _ := netip.AddrFromSlice(is[:m.addrLen])
		all = append(all, netip.AddrPortFrom(addr, binary.BigEndian.Uint16(is[m.addrLen:])))
	}
	return desired.EndpointsOf(all...), true
}

// links compares the links that are pinned, with the program of each.
func (v *verification) links() error {
	wanted, err := v.programs.wantedLinks()
	if err != nil {
		return err
	}
	paths, err := v.programs.find("links-*/*")
	if err != nil {
		return err
	}
	have := map[string]string{}
	for _, path := range paths {
		if name := filepath.Base(path); !strings.HasPrefix(name, programPin("")) {
			have[name] = path
		}
	}
	for name, w := range wanted {
		v.report.Checked++
		object := fmt.Sprintf("link of program %s to cgroup %s", w.program, w.cgroup)
		path := have[name]
		if path == "" {
			v.differs(proxier.Difference{Object: object, Problem: proxier.DifferenceMissing})
			continue
		}
		delete(have, name)
		if problem := v.link(path, w); problem != "" {
			v.differs(proxier.Difference{Object: object, Problem: proxier.DifferenceChanged, Have: problem})
		}
	}
	for _, path := range have {
		v.report.Checked++
		v.differs(proxier.Difference{Object: "link " + path, Problem: proxier.DifferenceUnexpected})
	}
	return nil
}

// link says what is wrong with a link; "" if nothing is.
func (v *verification) link(path string, w wantedLink) string {
	one, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = bpfx.Close(one) }()
	info, err := one.Info()
	if err != nil {
		return err.Error()
	}
	switch cgroup := info.Cgroup(); {
	case cgroup == nil:
		return "no link to a cgroup"
	case cgroup.CgroupId == 0:
		return "it is detached"
	case w.program+fmt.Sprintf("-%d", cgroup.CgroupId) != filepath.Base(path):
		return fmt.Sprintf("cgroup %d", cgroup.CgroupId)
	case ebpf.AttachType(cgroup.AttachType) != w.at:
		return fmt.Sprintf("attach type %v", ebpf.AttachType(cgroup.AttachType))
	}
	if problem := v.program(filepath.Base(path), info.Program, w); problem != "" {
		return problem
	}
	if besides(path) != info.Program {
		return "its program is not pinned beside it"
	}
	return ""
}

// program says what is wrong with the program of a link.
func (v *verification) program(link string, id ebpf.ProgramID, w wantedLink) string {
	program, err := ebpf.NewProgramFromID(id)
	if errors.Is(err, unix.EPERM) {
		if a, known := v.programs.attached[link]; known && a.program != id {
			return fmt.Sprintf("program %d instead of %d", id, a.program)
		}
		return ""
	}
	if err != nil {
		return fmt.Sprintf("program %d: %v", id, err)
	}
	defer func() { _ = bpfx.Close(program) }()
	info, err := program.Info()
	if err != nil {
		return fmt.Sprintf("program %d: %v", id, err)
	}
	// The kernel has the first 15 bytes. It has none if the library ran out of descriptors when it probed for names.
	if !strings.HasPrefix(w.program, info.Name) {
		return fmt.Sprintf("program %d, %s", id, info.Name)
	}
	ids, _ := info.MapIDs()
	for _, name := range layerMaps() {
		if uses := slices.Contains(ids, v.ids[name]); !uses && !strings.HasPrefix(w.program, "getpeername") && !strings.HasPrefix(w.program, "recvmsg") {
			return fmt.Sprintf("program %d, which does not use map %s", id, name)
		}
	}
	return ""
}
