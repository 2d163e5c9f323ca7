package proxier

import (
	"fmt"
	"reflect"
	"slices"

	"go.uber.org/zap"
)

// abilities are the further interfaces that an engine has.
func abilities(e Engine) []string {
	var names []string
	add := func(name string, has bool) {
		if has {
			names = append(names, name)
		}
	}
	_, has := As[Watcher](e)
	add("Watcher", has)
	_, has = As[Planner](e)
	add("Planner", has)
	_, has = As[Dumper](e)
	add("Dumper", has)
	_, has = As[Owner](e)
	add("Owner", has)
	_, has = As[DescriptorHolder](e)
	add("DescriptorHolder", has)
	return names
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
