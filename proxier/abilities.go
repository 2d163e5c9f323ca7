package proxier

import (
	"fmt"
	"reflect"
	"slices"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
)

// abilities lists what an engine can do beside Engine.
func abilities(e Engine) []string {
	var names []string
	for _, a := range []struct {
		name string
		has  bool
	}{
		{"Watcher", can[Watcher](e)},
		{"Planner", can[Planner](e)},
		{"Dumper", can[Dumper](e)},
		{"Counter", can[Counter](e)},
		{"Verifier", can[Verifier](e)},
		{"OwnsNames", can[owner](e)},
		{"Descriptors", can[descriptorHolder](e)},
		{"Conditions", can[conditional](e)},
	} {
		if a.has {
			names = append(names, a.name)
		}
	}
	return names
}

func can[T any](e Engine) bool {
	_, ok := As[T](e)
	return ok
}

// hiddenAbilities lists the abilities of an embedded engine that the outer one lacks. A
// wrapper such as struct{ proxier.Engine } hides them.
func hiddenAbilities(e Engine) []string {
	v := reflect.Indirect(reflect.ValueOf(e))
	if v.Kind() != reflect.Struct {
		return nil
	}
	inner := v.FieldByName("Engine")
	if !inner.IsValid() || !inner.CanInterface() {
		return nil
	}
	engine, ok := reflect.TypeAssert[Engine](inner)
	if !ok {
		return nil
	}
	shown := abilities(e)
	return slices.DeleteFunc(abilities(engine), func(name string) bool { return slices.Contains(shown, name) })
}

func warnOfHiddenAbilities(log *zap.Logger, e Engine) {
	if names := hiddenAbilities(e); len(names) > 0 {
		log.Warn("engine wrapper hides abilities: give it a method Unwrap() proxier.Engine, or these methods",
			zap.String("wrapper", fmt.Sprintf("%T", e)), zap.Strings("hidden", names))
	}
}

// warnOfLocalhost warns if node ports should be accepted at localhost, and the engine cannot.
func (f *family) warnOfLocalhost() {
	if !f.config.localhostNodePorts(f.name) {
		return
	}
	traits := f.engine.Traits(nil)
	if byRules := traits.LoopbackNodePorts && f.name == v1.IPv4Protocol; !byRules && !traits.LocalhostSockets {
		f.log.Warn("node ports are not accepted at localhost, the engine cannot: see package userspace/localhost")
	}
}
