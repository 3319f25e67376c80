"""From a script of verl to a configuration of this program: run the script with stubs, translate, write."""
