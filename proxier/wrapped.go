package proxier

import (
	"fmt"
	"reflect"
	"slices"

	"go.uber.org/zap"
)

// abilities are what an engine can do beside Engine.
func abilities(e Engine) []string {
	var names []string
	for _, a := range []struct {
		name string
		has  bool
	}{
		{"Watcher", can[Watcher](e)},
		{"Planner", can[Planner](e)},
		{"Dumper", can[Dumper](e)},
		{"OwnsNames", can[owner](e)},
		{"Descriptors", can[descriptorHolder](e)},
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

// hidden are the abilities of an engine that another one embeds without showing them, as
// struct{ proxier.Engine } does.
func hidden(e Engine) []string {
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

// warnOfHidden tells the operator what a wrapper costs.
func (f *family) warnOfHidden() {
	if names := hidden(f.engine); len(names) > 0 {
		f.log.Warn("the engine is wrapped, and cannot do all that it could: give the wrapper a method Unwrap() proxier.Engine, or these interfaces",
			zap.String("wrapper", fmt.Sprintf("%T", f.engine)), zap.Strings("hidden", names))
	}
}
