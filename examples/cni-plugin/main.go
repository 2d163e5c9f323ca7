// Cni-plugin is a chained CNI plugin that provides Services to pods with packets that
// bypass the node's network stack, as with macvlan and SR-IOV. It writes a file for each
// pod. The agent runs a proxy in the network namespace of each file's pod.
package main

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net/rpc"
	"os"
	"path/filepath"
	"slices"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

func main() {
	skel.PluginMainFuncs(skel.CNIFuncs{Add: with(add), Check: with(check), Del: with(del), GC: with(collect), Status: with(status)},
		version.PluginSupports("0.4.0", "1.0.0", "1.1.0"), "cni-plugin: Services in pods")
}

// request is a call of the runtime.
type request struct {
	types.PluginConf
	Dir  string        `json:"dir"` // of the pods' files and the agent's socket
	args *skel.CmdArgs // see the CNI specification
}

func with(f func(r request) error) func(*skel.CmdArgs) error {
	return func(args *skel.CmdArgs) error {
		r := request{Dir: "/run/serviceplane-cni", args: args}
		if err := errors.Join(json.Unmarshal(args.StdinData, &r), version.ParsePrevResult(&r.PluginConf)); err != nil {
			return types.NewError(types.ErrDecodingFailure, "read the configuration", err.Error())
		}
		return f(r)
	}
}

// file returns the path of a pod's file: a link to its network namespace.
func (r request) file(container, link string) string {
	return filepath.Join(r.Dir, r.Name+","+container+","+link+".pod")
}

// add returns when the pod can reach Services.
func add(r request) error {
	if r.PrevResult == nil {
		return types.NewError(types.ErrInvalidNetworkConfig, "chain it after the plugin that creates the interface", "")
	}
	if err := os.Symlink(r.args.Netns, r.file(r.args.ContainerID, r.args.IfName)); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "write the pod's file", err.Error())
	}
	if err := check(r); err != nil {
		return err
	}
	return types.PrintResult(r.PrevResult, r.CNIVersion)
}

func check(r request) error { return r.sync(r.file(r.args.ContainerID, r.args.IfName)) }

func status(r request) error { return r.sync("") }

func del(r request) error { return r.remove(r.file(r.args.ContainerID, r.args.IfName)) }

// collect removes the files of pods that the runtime does not list.
func collect(r request) error {
	gone, err := filepath.Glob(r.file("*", "*"))
	for _, valid := range r.ValidAttachments {
		gone = slices.DeleteFunc(gone, func(file string) bool { return file == r.file(valid.ContainerID, valid.IfName) })
	}
	return errors.Join(err, r.remove(gone...))
}

// remove needs no agent: the kernel deletes the rules with the namespace.
func (r request) remove(files ...string) error {
	for _, file := range files {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	err := r.sync("")
	if e, ok := errors.AsType[*types.Error](err); ok && e.Code == types.ErrPluginNotAvailable {
		return nil
	}
	return err
}

// sync makes the agent read the files, and waits for the proxy of one of them.
func (r request) sync(file string) error {
	agent, err := rpc.Dial("unix", filepath.Join(r.Dir, "agent.sock"))
	if err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "agent is not reachable", err.Error())
	}
	defer func() { _ = agent.Close() }()
	return agent.Call("Agent.Sync", file, new(bool))
}
